"""The SDKs' own types and accumulators take every kind of event, in every order, however a stream ends."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients import SDKS
from inflight.gateway.errors import ApiError
from inflight.gateway.messages.events import MessageUsage, MessageWriter
from inflight.gateway.responses.events import ResponseUsage, ResponseWriter
from inflight.gateway.responses.request import read_request
from inflight.gateway.turns import TurnRules
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from tests.gateway.programs.conftest import environment

Json = dict[str, Any]
OUTPUT: list[OutputEvent] = [
    *(ReasoningDelta("What "), ReasoningDelta("is it?"), ContentDelta("Let me "), ContentDelta("see.")),
    *(CallStart(0, "f"), ArgumentsDelta(0, '{"a": "Zürich'), ArgumentsDelta(0, ' 👋"}'), CallStart(1, "f")),
    *(ArgumentsDelta(1, "{}"), ContentDelta("Done."), ReasoningDelta("Am I?"), ContentDelta("Yes.")),
]
"""All kinds of output; every beginning of it is an output too."""
ASKED = {
    "model": "demo",
    "input": "Hi",
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "reasoning": {"summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}, "verbosity": "medium"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
}
SCORE = {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": -0.1, "bytes": [97]}]}

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


def response(output: list[OutputEvent], end: str) -> tuple[str, list[Json], Json]:
    """Return a stream of /v1/responses, with its name and its response."""
    shown = read_request(ASKED, strict=True, rules=TurnRules(), enforces=lambda _: True).shown | {
        "temperature": 1.0,
        "top_p": 1.0,
    }
    writer = ResponseWriter(shown, "demo", seals_reasoning=True)
    events = writer.begin() if output or end != "failed" else []
    for one in output:
        events += writer.add(one, [SCORE] if isinstance(one, ContentDelta) else [])
    if end == "failed":
        events += writer.fail(ApiError(500, "it broke", code="internal_error"))
    else:
        events += writer.finish(
            cut=end == "cut", usage=ResponseUsage(prompt=5, cached=2, written=4, output=1, reasoning=1)
        )
    return f"{len(output)} pieces, {end}", events, events[-1]["response"]


def message(output: list[OutputEvent], end: str, omits: bool) -> tuple[str, list[Json], Json]:
    """Return a stream of /v1/messages, with its name and its message."""
    writer, usage = (
        MessageWriter("demo", omits_thinking=omits),
        MessageUsage(prompt=5, cached=2, written=4, output=1, thinking=1),
    )
    events = writer.begin(usage)
    for one in output:
        events += writer.add(one)
    last, whole = writer.finish(end, "x" if end == "stop_sequence" else None, usage)
    return f"{len(output)} pieces, {end}", events + last, whole


def test_the_sdks_take_every_stream() -> None:
    beginnings = [OUTPUT[:size] for size in range(len(OUTPUT) + 1)]
    ends = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")
    streams = {
        "responses": [response(output, end) for output in beginnings for end in ("whole", "cut", "failed")],
        "messages": [message(output, end, omits) for output in beginnings for end in ends for omits in (False, True)],
    }
    command = [environment(SDKS).python, Path(__file__).parent / "accumulators.py"]
    done = subprocess.run(command, input=json.dumps(streams), capture_output=True, text=True, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == sum(map(len, streams.values())), done.stderr[-4000:]
    assert [one for one in found if one["disliked"]] == []
