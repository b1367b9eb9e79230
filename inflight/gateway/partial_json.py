"""Objects whose JSON may have been cut off: the fields that are complete, as Anthropic's clients read them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from inflight.text.output.incremental_json import JsonText

_CLOSERS = {"{": "}", "[": "]"}


def is_object(text: str) -> bool:
    """Return whether a text is the JSON of a whole object."""
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def corrected_object(text: str) -> str | None:
    """Return the JSON of an object that a model has got wrong, or that has been cut off: its complete fields.

    Args:
        text: is read character by character, a microsecond or two for each.

    Returns:
        None: the text begins no object.
    """
    value, text = JsonText(), text.strip()
    if not text.startswith("{"):
        return None
    accepted, place = value.feed(text, 0)
    if value.broken or place < len(text):
        return None
    return accepted if value.done else json.dumps(complete_fields(accepted), ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


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
