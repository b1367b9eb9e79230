"""The complete fields of an object whose JSON has been cut off, as Anthropic's clients read it from a stream."""

from __future__ import annotations

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


def complete_fields(text: str) -> dict[str, Any]:
    """Return what a beginning of an object's JSON says for sure: a text that is cut off is left out."""
    for end, closers in reversed(_ends(text)[-3:]):
        try:
            value = json.loads(text[:end] + closers)
        except ValueError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _ends(text: str) -> list[tuple[int, str]]:
    """Return where the text may be cut so that it is whole with the closing brackets that go with the place."""
    ends: list[tuple[int, str]] = []
    closers = ""
    in_string = escaped = False
    for place, character in enumerate(text):
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character == ",":
            ends.append((place, closers))
        elif character in _CLOSERS:
            closers = _CLOSERS[character] + closers
            ends.append((place + 1, closers))
        elif character in "}]":
            closers = closers[1:]
    return [*ends, (len(text), closers)]
