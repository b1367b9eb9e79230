"""JSON that strangers send, counted and shown without writing all of it."""

from __future__ import annotations

import json
from typing import Any

SHOWN_CHARACTERS = 80
"""The length from which on an error cuts a value."""


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
