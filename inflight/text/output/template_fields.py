"""A checkpoint's ``response_template``, validated: which fields an answer has and what delimits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import regex

from inflight.errors import DeploymentError
from inflight.text.output.template_values import is_kind, mixes

CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open",
    "open_pattern",
    "close",
    "close_pattern",
    "content",
    "content_args",
    "repeats",
    "join",
    "optional",
}
_FIELD_KEYS |= {"transform", "transform_each"}


@dataclass(frozen=True)
class Delimiter:
    """What opens or closes a field."""

    pattern: regex.Pattern
    grows: bool
    """Whether a match at the end of what has come may still become longer."""
    words: tuple[str, ...] = ()
    """The texts that it may be; (): it is a pattern."""


@dataclass(frozen=True)
class Field:
    """A part of an answer."""

    name: str
    opening: Delimiter | None
    closing: Delimiter | None
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    transform: Any = None
    each: bool = False


@dataclass(frozen=True)
class ResponseTemplate:
    """The description as a whole."""

    fields: tuple[Field, ...]
    anchor: regex.Pattern
    """What begins the assistant's turn."""
    texts: tuple[str, ...]
    """All texts that may hold the name of a special token."""

    @property
    def implicit(self) -> Field | None:
        """The field that has no opening delimiter: text outside the others belongs to it."""
        return next((one for one in self.fields if one.opening is None), None)

    @property
    def reasoning(self) -> Field | None:
        """The field of the reasoning."""
        return next((one for one in self.fields if one.name in REASONING), None)


def read_template(spec: Mapping[str, Any]) -> ResponseTemplate:
    """Validate a ``response_template``.

    Raises:
        DeploymentError: naming the key.
    """
    _require(set(spec) <= _KEYS, f"has {sorted(set(spec) - _KEYS)}, which nothing here knows")
    _require(spec.get("version", 1) == 1, f"has version {spec.get('version')!r}; it must be 1")
    given = spec.get("fields")
    _require(isinstance(given, dict) and bool(given), "has no fields")
    fields = tuple(_field(name, one) for name, one in (given or {}).items())
    _require(sum(one.opening is None for one in fields) <= 1, "has more than one field without open or open_pattern")
    anchor = _delimiter("start_anchor", spec, "start_anchor", "start_anchor_pattern")
    if anchor is None:
        raise DeploymentError("response_template has neither start_anchor nor start_anchor_pattern")
    return ResponseTemplate(fields, anchor.pattern, tuple(_texts(dict(given or {}))))


def _field(name: str, spec: Any) -> Field:
    known = (CONTENT, CALLS, *REASONING)
    _require(name in known, f"has the field {name!r}; served are {', '.join(known)}")
    _require(isinstance(spec, dict), f"has a field {name!r} that is no object")
    _require(set(spec) <= _FIELD_KEYS, f"has {sorted(set(spec) - _FIELD_KEYS)} in {name!r}, which nothing here knows")
    kind, options = spec.get("content", "text"), spec.get("content_args", {})
    _require(isinstance(kind, str) and is_kind(kind), f"has content {kind!r} in {name!r}, which nothing here knows")
    _require(name == CALLS or kind == "text", f"has content {kind!r} in {name!r}; only text is served there")
    transform = spec.get("transform")
    _require(not mixes(transform), f"has a transform in {name!r} with a placeholder beside other text")
    opening = _delimiter(name, spec, "open", "open_pattern")
    closing = _delimiter(name, spec, "close", "close_pattern")
    return Field(name, opening, closing, kind, options, transform, bool(spec.get("transform_each")))


def _delimiter(name: str, spec: Mapping[str, Any], literal: str, pattern: str) -> Delimiter | None:
    _require(not (literal in spec and pattern in spec), f"has both {literal} and {pattern} in {name!r}")
    if pattern in spec:
        try:
            return Delimiter(regex.compile(spec[pattern], regex.DOTALL), True)
        except (regex.error, TypeError) as error:
            raise DeploymentError(f"response_template has a bad {pattern} in {name!r}: {error}") from None
    if literal not in spec:
        return None
    words = [spec[literal]] if isinstance(spec[literal], str) else spec[literal]
    good = isinstance(words, list) and words and all(isinstance(word, str) and word for word in words)
    _require(bool(good), f"has {literal} {spec[literal]!r} in {name!r}; it must be a text or a list of texts")
    grows = any(one != other and one.startswith(other) for one in words for other in words)
    longest_first = sorted(words, key=len, reverse=True)
    return Delimiter(regex.compile("|".join(map(regex.escape, longest_first)), regex.DOTALL), grows, tuple(words))


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return [text for one in inside for text in _texts(one)]
    return [value] if isinstance(value, str) else []


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise DeploymentError(f"response_template {what}")
