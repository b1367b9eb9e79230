"""JSON that strangers send, read and shown without holding up the process.

Python's reader and writer are one C call each, in which no other thread runs: with millions of values that is a second,
and with one string of 15 MB a twentieth.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable
from json import JSONDecodeError
from types import FunctionType
from typing import Any

_MOST_AT_ONCE = 50_000
"""Marks of a text that one C call reads, in some milliseconds."""
_LONGEST_AT_ONCE = 1 << 20
"""Characters of such a text."""
_PIECES = 1 << 12, 1 << 18
"""Characters of a string's first piece, and of each further one."""
_UNFINISHED, _HALF = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z"), re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The end of a piece that cuts an escape, and one that may cut a pair of them that is one character."""
_NUMBER = re.compile(r"(-?(?:0|[1-9]\d{0,4299}))(\.\d{1,4300})?([eE][-+]?\d{1,4300})?")
"""A number with no more digits than Python makes an integer of."""
_MARKS = ",:[{"
SHOWN_CHARACTERS = 80
"""The length from which on an error cuts a value."""
Hook = Callable[[Any], Any]


def loads(
    text: str,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_float: Hook | None = None,
    parse_int: Hook | None = None,
    parse_constant: Hook | None = None,
) -> Any:
    """Return the value of a text, as ``json.loads`` does; a large one is read by Python, in many calls.

    Raises:
        ValueError: it is not JSON, or a hook refuses it.
        RecursionError: it is nested too deep.
    """
    decoder: Any = json.JSONDecoder(
        object_pairs_hook=object_pairs_hook,
        parse_float=parse_float,
        parse_int=parse_int,
        parse_constant=parse_constant,
    )
    if len(text) > _LONGEST_AT_ONCE or sum(map(text.count, _MARKS)) > _MOST_AT_ONCE:
        decoder.parse_string, decoder.parse_object = _read_string, _READ_OBJECT
        decoder.scan_once = _MAKE_SCANNER(decoder)
    return decoder.decode(text)


def _read_string(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    """Return the string whose first quote is before ``begin``, and the place behind its last one."""
    parts, place, (length, later) = list[str](), begin, _PIECES
    while True:
        piece, is_last = text[place : place + length], place + length >= len(text)
        length = later
        if not is_last:
            piece = _finished(piece)
        try:
            part, taken = _SCAN(piece if is_last else f'{piece}"', 0, strict)
        except JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated")
            raise JSONDecodeError(error.msg, text, begin - 1 if is_open else place + error.pos) from None
        parts.append(part)
        if taken <= len(piece):
            return "".join(parts), place + taken
        place += len(piece)


def _finished(piece: str) -> str:
    """Return a piece of a string without what of an escape is at its end."""
    for unfinished in _UNFINISHED, _HALF:
        if found := unfinished.search(piece, max(0, len(piece) - 6)):
            before = piece[: found.start() + 1]
            if (len(before) - len(before.rstrip("\\"))) % 2:  # the backslash is not an escaped one
                piece = before[:-1]
    return piece


def _with(function: Any, **names: Any) -> Any:
    """Return a function of Python's reader for which some names of its module mean something else."""
    return FunctionType(function.__code__, function.__globals__ | names, argdefs=function.__defaults__)


_SCAN: Callable[[str, int, bool], tuple[str, int]] = json.decoder.scanstring  # type: ignore[attr-defined]
_READ_OBJECT = _with(json.decoder.JSONObject, scanstring=_read_string)  # type: ignore[attr-defined]
_MAKE_SCANNER = _with(json.scanner.py_make_scanner, NUMBER_RE=_NUMBER)  # type: ignore[attr-defined]


def size(value: Any, most: int) -> int:
    """Return how many characters a value's JSON has at least; it is not counted on beyond ``most``."""
    found, waiting = 0, [value]
    while waiting and found <= most:
        one = waiting.pop()
        found += len(one) + 2 if isinstance(one, str) else 1
        if isinstance(one, list | dict):
            found += 1 + max(0, len(one) - 1)
            if found > most:
                break
            waiting.extend(one if isinstance(one, list) else one.values())
            if isinstance(one, dict):
                found += sum(len(name) + 3 for name in one)
    return found


def shown(value: Any) -> str:
    """Return a value as an error shows it: as JSON, and not all of a long one."""
    text = ""
    for part in json.JSONEncoder().iterencode(value[: SHOWN_CHARACTERS + 1] if isinstance(value, str) else value):
        text += part
        if len(text) > SHOWN_CHARACTERS:
            return f"{text[:SHOWN_CHARACTERS]}..."
    return text
