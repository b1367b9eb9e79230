"""Outputs of a model as events, for properties: drawn, and cut in other ways."""

from __future__ import annotations

from hypothesis import strategies as st

from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta

ARGUMENTS = ("{}", '{"a": 1}', '{"city": "Zürich 👋", "days": [1, 2.5, null], "deep": {"x": ["y", {}]}}')
_TEXT = st.text('ab \n"{}é👋', min_size=1, max_size=8)


@st.composite
def outputs(draw: st.DrawFn) -> list[OutputEvent]:
    """Draw a whole output: reasoning, text and calls in any order, each in one event."""
    events: list[OutputEvent] = []
    calls = 0
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(("content", "reasoning", "call")))
        if kind == "content":
            events.append(ContentDelta(draw(_TEXT)))
        elif kind == "reasoning":
            events.append(ReasoningDelta(draw(_TEXT)))
        else:
            events += [CallStart(calls, draw(st.sampled_from(("add", "get_weather"))))]
            events += [ArgumentsDelta(calls, draw(st.sampled_from(ARGUMENTS)))]
            calls += 1
    return events


def cut(draw: st.DrawFn, events: list[OutputEvent]) -> list[OutputEvent]:
    """Return the same output with its texts cut into pieces."""
    pieces: list[OutputEvent] = []
    for event in events:
        if isinstance(event, CallStart):
            pieces.append(event)
            continue
        text = event.text
        while text:
            size = draw(st.integers(1, len(text)))
            piece, text = text[:size], text[size:]
            if isinstance(event, ArgumentsDelta):
                pieces.append(ArgumentsDelta(event.index, piece))
            else:
                pieces.append(type(event)(piece))
    return pieces


@st.composite
def cut_outputs(draw: st.DrawFn) -> tuple[list[OutputEvent], list[OutputEvent]]:
    """Draw an output whole, and the same output in pieces."""
    whole = draw(outputs())
    return whole, cut(draw, whole)
