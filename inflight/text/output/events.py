"""What a model's output consists of, as events in the order in which it came."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the text that the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; calls are counted from 0. ``name`` is always that of a tool of the request."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, as JSON text; never empty. Joined, those of a complete call are a JSON object."""

    index: int
    text: str


OutputEvent = ContentDelta | ReasoningDelta | CallStart | ArgumentsDelta
