"""JSON that strangers send, read and shown without holding up the process.

Python's reader and writer are one C call each, in which no other thread runs: with millions of values that is a second.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable
from typing import Any

_MOST_AT_ONCE = 50_000
"""Marks of a text that one C call reads, in some milliseconds."""
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
    """Return the value of a text, as ``json.loads`` does; one with many values is read by Python, in many calls.

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
    if sum(map(text.count, _MARKS)) > _MOST_AT_ONCE:
        scanner: Any = json.scanner
        decoder.scan_once = scanner.py_make_scanner(decoder)
    return decoder.decode(text)


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
