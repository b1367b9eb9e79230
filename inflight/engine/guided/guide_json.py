"""JSON inside of guides, read strictly: what is checked here must be what llguidance reads."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from inflight.errors import InvalidRequest
from inflight.sampling import unique_keys

_MOST_LEVELS = 200
"""Lists and objects inside of each other. llguidance takes fewer, and names where there are too many."""
_SPACE = re.compile(r"\s*")


def read_json(text: str, what: str = "it") -> Any:
    """Return what a text says as JSON; ``what`` names it in errors.

    Raises:
        InvalidRequest: it is no JSON, or it has NaN, a number that no double is near, a key twice in one object, half
            a character, or too many levels.
    """
    value, end = decode_json(text, 0, what)
    if text[end:].strip():
        raise _wrong(what, f"is not valid JSON: more follows behind character {end}")
    return value


def decode_json(text: str, start: int, what: str) -> tuple[Any, int]:
    """Return the JSON that begins at ``start``, after white space, and the place behind it. Raises as ``read_json``."""
    begins = _SPACE.match(text, start)
    assert begins is not None
    try:
        value, end = _DECODER.raw_decode(text, begins.end())
        levels = _levels(value)
    except (ValueError, RecursionError) as error:
        raise _wrong(what, f"is not valid JSON: {error}") from None
    if levels > _MOST_LEVELS:
        raise _wrong(what, f"has lists and objects more than {_MOST_LEVELS} levels deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _wrong(what, r"has one half of a surrogate pair (\ud800 to \udfff), which is no character") from None
    return value, end


def _levels(value: Any) -> int:
    """Return how many lists and objects lie inside of each other, counted up to one more than may be."""
    levels, inside = 0, [value]
    while (inside := [one for one in inside if isinstance(one, dict | list)]) and levels <= _MOST_LEVELS:
        levels += 1
        inside = [inner for one in inside for inner in (one.values() if isinstance(one, dict) else one)]
    return levels


def _wrong(what: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"guided_decoding_guide: {what} {problem}")


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys, parse_float=_finite, parse_constant=_no_constant)
