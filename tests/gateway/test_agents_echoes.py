"""Whatever the Responses and the Messages API answer is taken back as input: clients send it with the next turn."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inflight.text.messages import check_messages
from inflight.text.output.events import ArgumentsDelta, OutputEvent
from tests.gateway.support.outputs import outputs
from tests.gateway.test_messages_events import write as write_message
from tests.gateway.test_messages_request import read as read_message
from tests.gateway.test_responses_events import write as write_response
from tests.gateway.test_responses_request import read

Json = dict[str, Any]
USER = {"role": "user", "content": "Hi"}


@st.composite
def cut_off(draw: st.DrawFn) -> list[OutputEvent]:
    """Draw an output that may end anywhere."""
    events = draw(outputs())
    if not events or not draw(st.booleans()):
        return events
    last = events[-1]
    if isinstance(last, ArgumentsDelta):
        text = last.text[: draw(st.integers(0, len(last.text)))]
        return [*events[:-1], *([ArgumentsDelta(last.index, text)] if text else [])]
    return events[: draw(st.integers(0, len(events)))]


def results(found: list[Json], kind: str, call_id: str, answer: Json) -> list[Json]:
    """Return the output of each call."""
    key = "call_id" if "call_id" in answer else "tool_use_id"
    return [answer | {key: one[call_id]} for one in found if one["type"] == kind]


@given(output=cut_off(), cut=st.booleans(), seals=st.booleans(), bare=st.booleans(), answers=st.booleans())
def test_items_of_a_response_are_taken_back(
    output: list[OutputEvent], cut: bool, seals: bool, bare: bool, answers: bool
) -> None:
    """With or without the fields that some clients leave out; in the next turn, or in the one of the tools."""
    items = write_response(output, cut=cut, seals=seals)[-1]["response"]["output"]
    if bare:
        items = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
    blank = {"type": "function_call_output", "call_id": "", "output": "3"}
    given = [*items, *(results(items, "function_call", "call_id", blank) if answers else []), USER]
    asked = read(strict=True, input=[USER, *given])
    assert asked.ignored == ()
    _check(asked.chat["messages"], items, "content", "function_call")


@given(output=cut_off(), omits=st.booleans(), answers=st.booleans())
def test_blocks_of_a_message_are_taken_back(output: list[OutputEvent], omits: bool, answers: bool) -> None:
    content = write_message(output, omits)[1]["content"]
    blank = {"type": "tool_result", "tool_use_id": "", "content": "3"}
    blocks = results(content, "tool_use", "id", blank) if answers else []
    turn = [
        {"role": "assistant", "content": content},
        {"role": "user", "content": [*blocks, {"type": "text", "text": "Hi"}]},
    ]
    asked = read_message(strict=True, messages=[USER, *turn])
    assert asked.ignored == ()
    _check(asked.chat["messages"], content, "text", "tool_use")


def _check(chat: list[Json], found: list[Json], text: str, call: str) -> None:
    """Check that the chat has one turn of the assistant with all of it, its tools' messages, and ends with the user."""
    check_messages(chat)
    roles = [message["role"] for message in chat]
    calls = [one for one in found if one["type"] == call]
    assert roles[:2] == ["user", "assistant"]
    assert roles[2:-1] == ["tool"] * (len(roles) - 3)
    assert roles[-1] == "user"
    assert len(chat[1].get("tool_calls", [])) == len(calls)
    texts = [
        one[text] if isinstance(one[text], str) else one[text][0]["text"]
        for one in found
        if one["type"] in ("text", "message")
    ]
    assert (chat[1]["content"] or "") == "\n".join(filter(None, texts))
