"""Fields of request bodies, and the one rule for them: a demand is obeyed or refused, a hint never refuses.

A demand changes what the answer means. A hint is a wish about quality, cost or storage. Each endpoint has one table,
in which a field declares its state; docs/openai-fields.md is written from the tables:

- *served*: a demand that is obeyed;
- *refused*: a demand that is not: 400 with the code ``unsupported_parameter``, unless its value asks for nothing;
- *accepted*: its value is checked, and what it asks for is so anyway; the table says why;
- *hint*: obeyed where the deployment can, else left out and named in the header ``x-ignored-fields``.

A null is an absent field. A field that no table knows is treated as a hint that nobody obeys. The header is counted,
and with ``gateway.strict_fields`` what it would name is refused. The same holds inside of other fields, by the path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inflight.errors import nearest
from inflight.gateway.errors import ApiError, invalid
from inflight.gateway.values import Kind, anything, same
from inflight.json_text import shown

State = Literal["served", "refused", "accepted", "hint"]
IGNORED_HEADER = "x-ignored-fields"
_MOST_NAMES, _NAME_CHARACTERS = 20, 64
Shape = Mapping[str, Any]
"""The fields that an object may have: each with the shape of the objects in its value, None where these may have any
fields, or a ``Field`` that is refused or a hint. A list counts as its elements."""
Variables = Mapping[str, Any]
"""Variables of a chat template."""
Obeys = Callable[[str, Any], Variables | None]
"""Tells which variables of the chat template a hint sets, given its name and its value; None: nothing obeys it."""
INDEX = re.compile(r"\[\d+\]", re.ASCII)


class RenderedShape(dict[str, Any]):
    """The shape of an object that the chat template gets: it may have whatever fields the template reads, too."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a request's body that clients are known to send."""

    name: str
    state: State
    kind: Kind
    doc: str
    """The field's effect here; of a refused field or a hint that is left out, why, or what to use instead."""
    neutral: tuple[Any, ...] = ()
    """Values that are accepted without a word: of a refused field those that ask for nothing, of a hint those that are
    so anyway."""
    inside: Shape | None = None
    """The fields that the objects in its value may have; None: the kind, or whoever reads the value, checks them."""

    def is_met(self, value: Any) -> bool:
        """Return whether a value asks for nothing, or for what is so anyway."""
        return any(same(value, one) for one in self.neutral)


Table = Mapping[str, Field]


def served(name: str, kind: Kind, doc: str, inside: Shape | None = None) -> Field:
    """Return a field that is served."""
    return Field(name, "served", kind, doc, inside=inside)


def accepted(name: str, kind: Kind, doc: str, inside: Shape | None = None) -> Field:
    """Return a field for which there is nothing to do here."""
    return Field(name, "accepted", kind, doc, inside=inside)


def refused(names: str, doc: str, *neutral: Any) -> list[Field]:
    """Return fields that are refused, unless they have one of the ``neutral`` values."""
    return [Field(name, "refused", anything(), doc, neutral) for name in names.split()]


def hint(names: str, kind: Kind, doc: str, *met: Any) -> list[Field]:
    """Return hints: wishes that are left out and named where the deployment does not obey them.

    Args:
        names: of the fields.
        kind: what a value must be; a value of another type is bad input, and refused as such.
        doc: what obeys it, or why nothing does.
        met: values that are so anyway, and are not named.
    """
    return [Field(name, "hint", kind, doc, met) for name in names.split()]


def table(*parts: Field | Iterable[Field]) -> Table:
    """Return a table of fields and lists of fields; a later one takes the place of an earlier one of its name."""
    flat = [one for part in parts for one in ([part] if isinstance(part, Field) else part)]
    return {one.name: one for one in flat}


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one body that ask for something, checked, and the names of those that are not known."""

    values: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    hints: Mapping[str, Variables] = field(default_factory=dict)
    """Template variables by each hint that is obeyed."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or ``default`` where it is absent or null."""
        return self.values.get(name, default)

    def either(self, name: str, other: str) -> Any:
        """Return the value of a field that has two names; None: neither is given.

        Raises:
            ApiError: 400: both are given, and say different things.
        """
        if name in self and other in self and not same(self[name], self[other]):
            raise invalid(f"{name} and {other} contradict each other; give one of them", other)
        return self.get(name, self.get(other))

    def __getitem__(self, name: str) -> Any:
        """Return the value of a field that is given."""
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        """Whether the field is given."""
        return name in self.values

    def naming(self, paths: Sequence[str], *, strict: bool) -> Fields:
        """Return the same fields, with the paths of fields inside of them that have no effect: one for each name.

        Raises:
            ApiError: 400: there are some, and fields are ``strict``.
        """
        if paths and strict:
            raise _unknown(paths[0])
        first = {INDEX.sub("[]", path): path for path in reversed(paths)}
        return replace(self, ignored=(*self.ignored, *reversed(first.values())))

    def headers(self) -> dict[str, str]:
        """Return the header that names what was ignored; {} where nothing was."""
        if not self.ignored:
            return {}
        names = [_header_word(name) for name in self.ignored[:_MOST_NAMES]]
        more = len(self.ignored) - len(names)
        return {IGNORED_HEADER: ", ".join(names) + (f", and {more} more" if more else "")}


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads bodies by the table of one endpoint."""

    fields: Table
    required: tuple[str, ...] = ()

    def read(
        self,
        body: Mapping[str, Any],
        *,
        strict: bool = False,
        spared: Callable[[str], bool] = lambda name: False,
        obeys: Obeys = lambda name, value: None,
    ) -> Fields:
        """Check a body and return its fields.

        Args:
            body: the JSON object of the request.
            strict: whether fields that would have no effect are refused.
            spared: whether the chat template reads fields of a name.
            obeys: what a hint sets, where the deployment obeys it.

        Raises:
            ApiError: 400, naming the field by its path.
        """
        values: dict[str, Any] = {}
        ignored: list[str] = []
        inside: list[str] = []
        hints: dict[str, Variables] = {}
        for name, value in body.items():
            if value is None:
                continue
            known = self.fields.get(name)
            if known is None:
                ignored.append(name)
            elif known.state == "refused":
                _refuse(known, value, name)
            else:
                read = known.kind.read(value, name)
                if known.state == "hint":
                    if (variables := obeys(name, read)) is not None:
                        hints[name] = variables
                    elif not known.is_met(value):
                        inside.append(name)
                        continue
                values[name] = read
                if known.inside is not None:
                    inside += _without_effect(value, known.inside, name, spared)
        if ignored and strict:
            raise _unknown(ignored[0], self.fields)
        for name in self.required:
            if name not in values:
                raise ApiError(400, f"{name} is missing", code="missing_required_parameter", param=name)
        return Fields(values, tuple(ignored), hints).naming(inside, strict=strict)


def _unknown(name: str, known: Iterable[str] = ()) -> ApiError:
    """Return the error of a field without effect; one of the ``known`` names may be meant."""
    short = name[:_NAME_CHARACTERS]
    near = nearest(short, known)
    message = f"{short} is not a known field{near}" if known else f"{short} has no effect here; leave it out"
    return ApiError(400, message, code="unknown_parameter", param=short)


def unsupported(param: str, message: str) -> ApiError:
    """Return the error of what is known and not served: 400, since SDKs send again what ends with 5xx."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def unserved(value: Any, path: str, reason: str) -> ApiError:
    """Return the error of a value that asks for what is not served, for a ``reason``."""
    return unsupported(path, f"{path} is {shown(value)}, which is not supported: {reason}")


def _without_effect(value: Any, shape: Shape, path: str, spared: Callable[[str], bool]) -> Iterator[str]:
    """Yield the paths of hints and of what is not known inside of a value; a null is an absent field.

    Args:
        value: of a field, as JSON has it; what is neither an object nor a list has no fields.
        shape: what the objects in it may have.
        path: of the value.
        spared: whether the chat template reads fields of a name, where it gets the object.

    Raises:
        ApiError: 400: a field is known and not served.
    """
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _without_effect(one, shape, f"{path}[{index}]", spared)
        return
    for name, one in value.items() if isinstance(value, dict) else ():
        inner, place = shape.get(name), f"{path}.{name}"
        if one is None:
            continue
        if isinstance(inner, Field):
            yield from _checked(inner, one, place)
        elif inner is not None:
            yield from _without_effect(one, inner, place, spared)
        elif name not in shape and not (isinstance(shape, RenderedShape) and spared(name)):
            yield place


def _checked(known: Field, value: Any, path: str) -> Iterator[str]:
    """Yield the path of a hint inside of a value that is left out. Raises ApiError: the field is refused."""
    if known.state != "hint":
        _refuse(known, value, path)
    elif not known.is_met(known.kind.read(value, path)):
        yield path


def _refuse(known: Field, value: Any, path: str) -> None:
    """Raise ApiError, unless a refused field has a value that asks for nothing."""
    if not known.is_met(value):
        raise unserved(value, path, known.doc)


def _header_word(name: str) -> str:
    """Return a field's name as a header can carry it."""
    word = name[:_NAME_CHARACTERS].encode("ascii", "backslashreplace").decode()
    return "".join(one if one.isprintable() and one not in ",;" else "?" for one in word)
