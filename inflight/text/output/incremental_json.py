"""A JSON value read character by character: how far a text still begins a value, and where the value ends."""

from __future__ import annotations

import json
import math
import re
import sys
from typing import Any

MAX_DEPTH = 200
"""Most brackets inside each other: Python's parser, which many clients use, gives up at a thousand."""
_MAX_NUMBER = 1024
"""Most characters of a number: Python's parser gives up at 4,300 digits."""
_LARGEST = sys.float_info.max
_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_LITERALS = {"t": ("true", "true"), "f": ("false", "false"), "n": ("null", "null")}
_LITERALS |= {"T": ("True", "true"), "F": ("False", "false"), "N": ("None", "null")}
"""Literals by their first characters: as they are spelt, and in JSON. Models write Python's too."""
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = "0123456789"
# Parts of a number: what may follow each, by the kind of character. Those of _ENDS may end the number.
_NUMBER = {
    "-": {"0": "0", "9": "int"},
    "0": {".": ".", "e": "e"},
    "int": {"0": "int", "9": "int", ".": ".", "e": "e"},
    ".": {"0": "frac", "9": "frac"},
    "frac": {"0": "frac", "9": "frac", "e": "e"},
    "e": {"0": "exp", "9": "exp", "-": "sign", "+": "sign"},
    "sign": {"0": "exp", "9": "exp"},
    "exp": {"0": "exp", "9": "exp"},
}
_ENDS = frozenset({"0", "int", "frac", "exp"})
_SURROGATE = re.compile("[\ud800-\udfff]")


def to_json(value: Any) -> str:
    """Return a value as JSON that UTF-8 can carry. Raises ValueError: JSON has no such value."""
    return escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def escape_surrogates(text: str) -> str:
    """Escape halves of surrogate pairs inside JSON: they are no characters."""
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def finite(number: str) -> str:
    """Return a JSON number; one that no float can hold becomes the largest: readers make an infinity of it."""
    if number.lstrip("-").isdigit() or not math.isinf(value := float(number)):
        return number
    return repr(math.copysign(_LARGEST, value))


def as_json(text: str) -> str | None:
    """Return the JSON that a text is, as ``JsonText`` corrects it, without space around it; None: it is none."""
    value = JsonText()
    accepted, place = value.feed(f"{text} ", 0)  # a space ends a number
    return escape_surrogates(accepted.strip()) if value.done and not text[place:].strip(" \t\r\n") else None


class JsonText:
    """Follows one JSON value, and corrects what models get wrong in it.

    Control characters inside strings are escaped, Python's literals become those of JSON, a comma before a closing
    bracket is left out, and numbers are ``finite``. Numbers and commas are held until it is certain what they become.
    The accepted text is the same however the input is cut: it ends at the first character that no JSON value has there.
    """

    def __init__(self) -> None:
        self.done = False
        """Whether the value is complete; a number is, once the character behind it has come."""
        self.broken = False
        """Whether the next character cannot follow."""
        self._state = "value"
        self._stack: list[str] = []
        self._part = ""
        """What has come of a literal or of the digits of an escape; of a number, which part of it has come last."""
        self._is_key = False
        self._held = ""
        """A number, or a comma and the space behind it."""

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a string."""
        return self._state in ("string", "escape", "hex")

    @property
    def expects_key(self) -> bool:
        """Whether the next value is a key of an object."""
        return self._state in ("key", "key or end")

    def feed(self, text: str, place: int) -> tuple[str, int]:
        """Read ``text`` from ``place`` on; return what was accepted, as JSON, and the place of what was not read."""
        accepted: list[str] = []
        while place < len(text) and not self.done and not self.broken:
            match self._state:
                case "string":
                    place = self._string(text, place, accepted)
                case "number":
                    place = self._number(text, place, accepted)
                case "escape" | "hex" | "literal":
                    place = self._inside(text, place, accepted)
                case _:
                    place = self._between(text, place, accepted)
        if self.broken:
            accepted.append(self.rest())
        return "".join(accepted), place

    def rest(self) -> str:
        """Return what has been read and is still held, where nothing more is to be read."""
        held, self._held = self._held, ""
        return held

    def _string(self, text: str, place: int, accepted: list[str]) -> int:
        if match := _PLAIN.match(text, place):
            accepted.append(match[0])
            return match.end()
        character = text[place]
        if character == "\\":
            self._state = "escape"
        elif character == '"':
            self._value_ends("colon" if self._is_key else None)
        accepted.append(character if character in '\\"' else f"\\u{ord(character):04x}")
        return place + 1

    def _inside(self, text: str, place: int, accepted: list[str]) -> int:
        """Read one character of an escape or of a literal."""
        character = text[place]
        if self._state == "literal":
            return self._literal(character, place, accepted)
        if self._state == "escape":
            self.broken = character not in _ESCAPES and character != "u"
            self._state, self._part = "hex" if character == "u" else "string", ""
        else:
            self.broken = character not in _HEX
            self._part += character
            self._state = "string" if len(self._part) == 4 else "hex"
        return self._accept(character, place, accepted)

    def _literal(self, character: str, place: int, accepted: list[str]) -> int:
        spelt, meant = _LITERALS[self._part[0]]
        at = len(self._part)
        self.broken = character != spelt[at]
        if not self.broken:
            self._part += character
            if self._part == spelt:
                self._value_ends()
        return self._accept(meant[at], place, accepted)

    def _number(self, text: str, place: int, accepted: list[str]) -> int:
        character = text[place]
        kind = {"0": "0", "E": "e"}.get(character, "9" if character in _DIGITS else character)
        following = _NUMBER[self._part].get(kind)
        if following is not None and len(self._held) < _MAX_NUMBER:
            self._part = following
            self._held += character
            return place + 1
        if following is None and self._part in _ENDS:
            accepted.append(finite(self.rest()))
            self._value_ends()
        else:
            self.broken = True
        return place

    def _between(self, text: str, place: int, accepted: list[str]) -> int:
        """Read what stands outside strings, numbers and literals."""
        if match := _SPACE.match(text, place):
            if self._held:
                self._held += match[0]
            else:
                accepted.append(match[0])
            return match.end()
        character = text[place]
        state = self._state
        if state in ("value", "value or end", "next value") and self._begins(character):
            pass
        elif state in ("key", "key or end") and character == '"':
            self._state, self._is_key = "string", True
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "comma or end" and character == ",":
            self._state = "key" if self._stack[-1] == "}" else "next value"
            self._held = ","
            return place + 1
        elif state not in ("value", "colon") and character == self._stack[-1]:
            self._held = self._held[1:]
            self._stack.pop()
            self._value_ends()
        else:
            self.broken = True
            return place
        accepted.append(self.rest())
        if self._state == "number":
            self._held = character
            return place + 1
        return self._accept(_LITERALS[character][1][0] if self._state == "literal" else character, place, accepted)

    def _begins(self, character: str) -> bool:
        """Return whether a value begins with this character, and go into it."""
        if character in "{[":
            self._stack.append("}" if character == "{" else "]")
            self._state = "key or end" if character == "{" else "value or end"
            return len(self._stack) <= MAX_DEPTH
        if character == '"':
            self._state, self._is_key = "string", False
        elif character in _LITERALS:
            self._state, self._part = "literal", character
        elif character == "-" or character in _DIGITS:
            self._state, self._part = "number", {"-": "-", "0": "0"}.get(character, "int")
        else:
            return False
        return True

    def _value_ends(self, following: str | None = None) -> None:
        self._is_key = False
        self._state = following or "comma or end"
        self.done = not self._stack and following is None

    def _accept(self, character: str, place: int, accepted: list[str]) -> int:
        if self.broken:
            return place
        accepted.append(character)
        return place + 1
