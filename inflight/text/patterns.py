"""Patterns of JSON Schema, which are regular expressions of ECMA-262, in the syntax of Rust's ``regex``.

llguidance reads Rust's syntax. It looks much the same, and some of it means something else: white space has other
characters, ``.`` leaves out fewer line ends, a class may hold classes and operators. A pattern that is passed on as it
is would accept strings that the schema forbids.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import regex

_SPACE = r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0C", "v": r"\x0B", "0": r"\x00"}
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PAIR = re.compile(r"u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")
_REPETITION = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_GROUP = re.compile(r"\(\?(:|<[A-Za-z_]\w*>)")

_SLASH, _ESCAPED_SLASH = re.compile(r"(\\.)|/", re.DOTALL), r"\/"
_CODE = re.compile(r"\\x(?:\{([0-9A-Fa-f]+)\}|([0-9A-Fa-f]{2}))")
_COUNTS = re.compile(r"\{([0-9]+)(?:,([0-9]*))?\}")
_LONGEST_COUNTS = len("{999999999,999999999}")
_WHITE = {r"\t": 9, r"\n": 10, r"\r": 13}
_SETS = (r"\d", r"\D", r"\w", r"\W", r"\p", r"\P", "[^")
"""What classes of characters begin with; a hyphen behind one is itself."""
_MOST_NESTED = 60
"""Groups in groups. llguidance takes 250 nodes in nodes, and a group may be four: of branches, of parts, repeated."""


class BadPattern(ValueError):
    """A pattern that cannot be enforced; the message says why."""


def rust_pattern(pattern: str) -> str:
    """Return the pattern in Rust's syntax; it matches the same strings.

    Raises:
        BadPattern: it has what Rust's ``regex`` has no equal for, or what is no pattern.
    """
    made, place, structure = [], 0, _Structure()
    while place < len(pattern):
        piece, place = _next(pattern, place)
        structure.add(piece)
        made.append(piece)
    structure.end()
    return "".join(made)


@dataclass
class _Group:
    """What has been read of an open group; the pattern itself is the outermost one."""

    inherited: bool
    """Whether characters stand before the group."""
    begun: bool
    """Whether characters stand before the next piece."""
    ended: bool = False
    """Whether ``$`` stands before the next piece."""
    may_end: bool = False
    """Whether a branch before this one has ended with ``$``."""


class _Structure:
    """Checks that the pieces of a pattern, in Rust's syntax, make one that llguidance takes."""

    def __init__(self) -> None:
        self._groups = [_Group(inherited=False, begun=False)]
        self._repeatable = False

    def add(self, piece: str) -> None:
        """Take the next piece. Raises BadPattern: it cannot stand here."""
        group, counts = self._groups[-1], _COUNTS.fullmatch(piece)
        if counts is not None or piece in ("*", "+", "?"):
            if not self._repeatable:
                raise BadPattern(f"{piece!r} has nothing to repeat")
            if len(piece) > _LONGEST_COUNTS:
                raise BadPattern(f"{piece[:16]}... repeats too often")
            if counts is not None and counts[2] and int(counts[1]) > int(counts[2]):
                raise BadPattern(f"{piece!r} has a smaller limit than its beginning")
            return
        if piece == ")":
            self._close()
        elif piece == "|":
            group.may_end |= group.ended
            group.ended, group.begun = False, group.inherited
        elif piece == "$":
            group.ended = True
        elif group.ended or (piece == "^" and group.begun):
            raise BadPattern("'^' and '$' are supported at the ends alone")
        elif piece in ("(", "(?:"):
            if len(self._groups) > _MOST_NESTED:
                raise BadPattern(f"groups stand in more than {_MOST_NESTED} groups")
            self._groups.append(_Group(group.begun, group.begun))
        elif piece != "^":
            group.begun = True
        self._repeatable = piece not in ("(", "(?:", "|", "^", "$")

    def end(self) -> None:
        """Take the end of the pattern. Raises BadPattern: a group is open."""
        if len(self._groups) > 1:
            raise BadPattern("a group is not closed")

    def _close(self) -> None:
        inner = self._groups.pop()
        if not self._groups:
            raise BadPattern("a group is closed that is not open")
        outer = self._groups[-1]
        outer.begun, outer.ended = True, inner.ended or inner.may_end


def lark_expression(pattern: str) -> str:
    """Return an expression in Rust's syntax as Lark has it.

    Raises:
        BadPattern: it ends within an escape, which would take in the end that Lark sets.
    """
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise BadPattern("it ends within an escape")
    if not pattern:
        return '""'  # Lark's // begins a comment
    return f"/{_SLASH.sub(lambda found: found[1] or _ESCAPED_SLASH, pattern)}/"


def _next(pattern: str, place: int) -> tuple[str, int]:
    """Return what stands at ``place`` outside of a class, in Rust's syntax, and the place behind it."""
    one = pattern[place]
    if one == "\\":
        return _escape(pattern, place + 1, in_class=False)
    if one == "[":
        return _class(pattern, place + 1)
    if one == ".":
        return _ANY, place + 1
    if one == "{":
        repetition = _REPETITION.match(pattern, place)
        return (repetition[0], repetition.end()) if repetition else (r"\{", place + 1)
    if one in "]}":
        return f"\\{one}", place + 1
    if pattern.startswith("(?", place):
        group = _GROUP.match(pattern, place)
        if group is None:
            raise BadPattern(f"{pattern[place : place + 4]!r}: look-around and flags are not supported")
        return "(?:", group.end()
    return one, place + 1


def _class(pattern: str, place: int) -> tuple[str, int]:
    """Return the class whose inside begins at ``place``, and the place behind it."""
    negated = pattern.startswith("^", place)
    place += negated
    parts = list[str]()
    while place < len(pattern) and pattern[place] != "]":
        if pattern[place] == "\\":
            piece, place = _escape(pattern, place + 1, in_class=True)
        else:
            one = pattern[place]
            # An operator such as && begins with two of them; one alone is escaped just as well.
            piece, place = (f"\\{one}" if one in "[&~^" else one), place + 1
        parts.append(piece)
    if place >= len(pattern):
        raise BadPattern("a class is not closed")
    _check_ranges(parts)
    inside = _without_double_hyphens("".join(parts))
    if not inside:  # [] matches nothing, [^] everything
        return (r"[\x{0}-\x{10FFFF}]" if negated else r"[^\x{0}-\x{10FFFF}]"), place + 1
    return f"[{'^' if negated else ''}{inside}]", place + 1


def _check_ranges(parts: list[str]) -> None:
    """Check the ranges among the parts of a class. Raises BadPattern: one ends before it begins, or with a class."""
    place = 0
    while place + 2 < len(parts):
        first, hyphen, last = parts[place : place + 3]
        if hyphen == "-" and (first[:2] not in _SETS or first == _SPACE):
            if (low := _code(first)) is None or (high := _code(last)) is None or low > high:
                raise BadPattern(f"{first[-12:]}-{last[:12]} is no range of characters")
            place += 2
        place += 1


def _code(part: str) -> int | None:
    """Return the number of the character that a part of a class stands for; None: it stands for several."""
    if (code := _CODE.fullmatch(part)) is not None:
        return int(code[1] or code[2], 16)
    if part in _WHITE:
        return _WHITE[part]
    return ord(part[-1]) if len(part) == 1 or (len(part) == 2 and not part[1].isalnum()) else None


def _without_double_hyphens(inside: str) -> str:
    if "--" in inside:
        raise BadPattern("a class with '--' is read in different ways; escape the hyphen that it is to hold")
    return inside


def _property(escape: str) -> str:
    """Return the escape of a property of characters. Raises BadPattern: Unicode has no such property."""
    try:
        regex.compile(escape)
    except regex.error:
        raise BadPattern(f"{escape} is no property of characters") from None
    return escape


def _escape(pattern: str, place: int, in_class: bool) -> tuple[str, int]:
    r"""Return what the escape means whose character behind ``\`` is at ``place``, and the place behind it."""
    if place >= len(pattern):
        raise BadPattern("it ends within an escape")
    one = pattern[place]
    if (pair := _PAIR.match(pattern, place)) is not None:
        high, low = int(pair[1], 16), int(pair[2], 16)
        return f"\\x{{{0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00):X}}}", pair.end()
    if (code := _HEX.match(pattern, place)) is not None:
        digits = code[1] or code[2] or code[3]
        if 0xD800 <= int(digits, 16) < 0xE000 or int(digits, 16) > sys.maxunicode:
            raise BadPattern(f"\\{code[0]} is no character")
        return f"\\x{{{digits}}}", code.end()
    if one in "dDwW":  # llguidance takes those of a schema's patterns for ASCII's, as ECMA-262 does
        return f"\\{one}", place + 1
    if one in "sS":
        return (_SPACE if in_class and one == "s" else f"[{'^' * (one == 'S')}{_SPACE}]"), place + 1
    if one in _CONTROLS and not (one == "0" and pattern[place + 1 : place + 2].isdigit()):
        return _CONTROLS[one], place + 1
    if one == "c" and re.match("[A-Za-z]", pattern[place + 1 :]):
        return f"\\x{{{ord(pattern[place + 1]) % 32:X}}}", place + 2
    if (named := _PROPERTY.match(pattern, place)) is not None:
        return _property(f"\\{named[0]}"), named.end()
    if one == "b" and in_class:
        return r"\x08", place + 1
    if one.isalnum():
        raise BadPattern(f"the escape \\{one} is not supported")
    return (f"\\{one}" if one.isascii() and one not in "<>" else one), place + 1  # Rust's \\< begins a word
