"""Parts of structural tags as Lark: neighbours that expressions can describe become one lexeme.

llguidance splits a text into lexemes, each as long as can be, before it parses. An expression such as ``.*`` before an
end would take the end in, and the text could never end. Within one lexeme it does not. Where an expression stands
before a schema, or before what recursion describes, it is looked whether it could go on in what follows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.errors import InvalidRequest

ANY = "/(?s:.)/"
_JSON_BEGINS = r'/[-0-9"\[{tfn]/'
_NUMBERS_GO_ON = "/[-+.0-9eE]/"


@dataclass(frozen=True, slots=True)
class Atom:
    """Lark for a piece of text."""

    lark: str
    is_regular: bool = True
    """Whether it may be a part of a lexeme; otherwise it consists of rules."""
    first: str = ANY
    """The characters with which it may begin, as Lark."""
    goes_on: str | None = None
    """The characters with which it may go on where it might end as well; only of what consists of rules."""
    is_fixed: bool = False
    """Whether it is one text."""
    needs: str = ""
    """The lines that the Lark refers to."""


Part = tuple[Atom, ...]
"""Atoms, one after the other."""


def literal(text: str) -> Part:
    """Return a text as a part; () if it is empty."""
    return (Atom(json.dumps(text), first=f"/\\x{{{ord(text[0]):X}}}/", is_fixed=True),) if text else ()


def schema_atom(rule: str, may_be_number: bool) -> Atom:
    """Return a rule that is a JSON schema."""
    return Atom(rule, False, _JSON_BEGINS, _NUMBERS_GO_ON if may_be_number else None)


def wrong(place: str, problem: str) -> InvalidRequest:
    """Return the error of a structural tag."""
    return InvalidRequest(f"guided_decoding_guide: {place} {problem}")


class Lines:
    """The rules and terminals of a structural tag."""

    def __init__(self, is_empty: Callable[[str], bool]) -> None:
        """``is_empty``: whether no text is a sentence of a Lark grammar."""
        self._is_empty = is_empty
        self.lines: list[str] = []
        self._count = 0

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule; return its name."""
        return self._add("s", options, body)

    def number(self) -> int:
        """Return a number that no other name has."""
        self._count += 1
        return self._count

    def emit(self, part: Part, place: str, follows: str | None) -> str:
        """Return a part as an expression of rules, and add its terminals.

        Args:
            part: the part.
            place: its place, for errors.
            follows: the characters that may come behind it, as Lark; None: nothing does.

        Raises:
            InvalidRequest: it, or something inside of it, could go on in what follows.
        """
        runs = _runs(part)
        for index, run in enumerate(runs):
            next_ = runs[index + 1][0].first if index + 1 < len(runs) else follows
            if next_ is not None and self._takes_in(run, next_):
                raise wrong(
                    place, "has a part that could go on in what follows it; a fixed text must stand between them"
                )
        made = [self._add("S", "", _joined(run)) if run[0].is_regular else run[0].lark for run in runs]
        return " ".join(made) or '""'

    def either(self, parts: Iterable[tuple[Part, str]], follows: str | None) -> Part:
        """Return the choice among parts, each with its place."""
        given = list(parts)
        if _are_regular(atoms := [atom for part, _ in given for atom in part]):
            return (Atom(f"({' | '.join(_joined(part) for part, _ in given)})", needs=_needs(atoms)),)
        return (Atom(f"({' | '.join(self.emit(part, place, follows) for part, place in given)})", False),)

    def repeated(self, part: Part, suffix: str, place: str, follows: str | None) -> Part:
        """Return a part again and again: ``?``, ``+`` or ``*``."""
        if _are_regular(part):
            return (Atom(f"({_joined(part)}){suffix}", needs=_needs(part)),)
        return (Atom(f"({self.emit(part, place, follows if suffix == '?' else ANY)}){suffix}", False),)

    def _add(self, prefix: str, options: str, body: str) -> str:
        name = f"{prefix}_{self.number()}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _takes_in(self, run: Part, behind: str) -> bool:
        """Return whether what comes behind atoms could belong to them as well."""
        if not run[0].is_regular:
            going_on = run[0].goes_on
            return going_on is not None and not self._is_empty(f"start: X\nX: {going_on} & {behind}")
        if all(atom.is_fixed for atom in run):
            return False
        lexeme = f"({_joined(run)})"
        return not self._is_empty(f"start: X\nX: {lexeme} & ({lexeme} {behind} /(?s:.*)/)\n{_needs(run)}")


def _runs(part: Part) -> list[Part]:
    """Return the atoms of a part: neighbours that are regular together, others alone."""
    runs: list[Part] = []
    for atom in part:
        if runs and atom.is_regular and runs[-1][0].is_regular:
            runs[-1] = (*runs[-1], atom)
        else:
            runs.append((atom,))
    return runs


def _are_regular(atoms: Iterable[Atom]) -> bool:
    return all(atom.is_regular for atom in atoms)


def _needs(atoms: Iterable[Atom]) -> str:
    return "\n".join(dict.fromkeys(atom.needs for atom in atoms if atom.needs))


def _joined(atoms: Iterable[Atom]) -> str:
    return " ".join(atom.lark for atom in atoms) or '""'
