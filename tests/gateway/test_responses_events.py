"""Events of responses: their order, and that they add up to the response at the end, however the output was cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.gateway.errors import ApiError
from inflight.gateway.log_probs import TokenLogProb
from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.responses.events import ResponseUsage, ResponseWriter
from inflight.gateway.responses.log_probs import TextLogProbs
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from tests.gateway.support.outputs import cut_outputs
from tests.support.tables import each_row

Json = dict[str, Any]
USAGE = ResponseUsage(prompt=10, cached=4, written=5, output=7, reasoning=2)
SHOWN = {"tools": [], "text": {"format": {"type": "text"}}}


def write(outputs: list[OutputEvent], cut: bool = False, seals: bool = False) -> list[Json]:
    writer = ResponseWriter(SHOWN, "demo", seals_reasoning=seals)
    events = writer.begin()
    for output in outputs:
        events += writer.add(output)
    return events + writer.finish(cut=cut, usage=USAGE)


def replay(events: list[Json]) -> list[Json]:
    """Return the items that the events add up to, by their deltas alone."""
    items: list[Json] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(dict(event["item"]))
            case "response.content_part.added":
                items[event["output_index"]]["content"] = [dict(event["part"])]
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "response.output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
    return items


def without_ids(value: Any) -> Any:
    """Return JSON without ids and times, which no two answers share."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(one) for name, one in value.items() if name not in hidden}
    return value


@given(cut_outputs())
def test_events_add_up_to_the_response_and_do_not_depend_on_the_pieces(
    drawn: tuple[list[OutputEvent], list[OutputEvent]],
) -> None:
    whole, pieces = drawn
    events = write(pieces)
    response = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert replay(events) == response["output"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    assert without_ids(response) == without_ids(write(whole)[-1]["response"])


@given(cut_outputs())
def test_the_response_says_what_the_model_put_out(drawn: tuple[list[OutputEvent], list[OutputEvent]]) -> None:
    whole, pieces = drawn
    output = write(pieces)[-1]["response"]["output"]
    texts = [item["content"][0]["text"] for item in output if item["type"] == "message"]
    thoughts = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    assert "".join(texts) == "".join(event.text for event in whole if isinstance(event, ContentDelta))
    assert "".join(thoughts) == "".join(event.text for event in whole if isinstance(event, ReasoningDelta))
    names = [event.name for event in whole if isinstance(event, CallStart)]
    assert calls == list(zip(names, [event.text for event in whole if isinstance(event, ArgumentsDelta)], strict=True))
    ids = [item["id"] for item in output] + [item["call_id"] for item in output if item["type"] == "function_call"]
    assert len(set(ids)) == len(ids)


def test_the_order_of_events() -> None:
    events = write(
        [ReasoningDelta("Hm."), ContentDelta("Yes"), ContentDelta("."), CallStart(0, "f"), ArgumentsDelta(0, "{}")]
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["output_index"] for event in events if "output_index" in event] == [0] * 6 + [1] * 7 + [2] * 4
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["status"] == "completed"
    assert events[-1]["response"]["completed_at"] is not None


def test_what_a_limit_cuts_is_incomplete() -> None:
    events = write([ContentDelta("Yes"), CallStart(0, "f"), ArgumentsDelta(0, '{"a')], cut=True)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert response["output"][1]["arguments"] == '{"a'
    *_, done, last = write([ContentDelta("Yes")], cut=True)
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


@pytest.mark.parametrize("cut", [False, True])
@each_row("arguments, status", [("", "incomplete"), ('{"a": ', "incomplete"), ('{"a": 1}', "completed")])
def test_a_call_is_complete_with_its_arguments(cut: bool, arguments: str, status: str) -> None:
    """A stop string may cut a call, and the limit of tokens may come behind a whole one."""
    output: list[OutputEvent] = [CallStart(0, "f"), *([ArgumentsDelta(0, arguments)] if arguments else [])]
    [call] = write(output, cut=cut)[-1]["response"]["output"]
    assert call["status"] == status


def test_an_output_of_nothing_is_a_message_without_text() -> None:
    [message] = write([])[-1]["response"]["output"]
    assert message["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    [reasoning] = write([ReasoningDelta("Hm.")], cut=True)[-1]["response"]["output"]
    assert reasoning["type"] == "reasoning"


def test_a_failure_ends_what_is_open_and_is_told_twice() -> None:
    writer = ResponseWriter(SHOWN, "demo")
    writer.begin()
    writer.add(ContentDelta("Yes"))
    *done, error, failed = writer.fail(ApiError(500, "it broke", code="internal_error"))
    assert done[-1]["type"] == "response.output_item.done"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert (error["type"], error["message"], error["error"]["message"]) == ("error", "it broke", "it broke")
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_a_failure_before_anything_else_has_the_first_events_too() -> None:
    """The stream has begun already where comments keep it alive."""
    events = ResponseWriter(SHOWN, "demo").fail(ApiError(500, "it broke"))
    assert [event["type"] for event in events] == [
        *("response.created", "response.in_progress", "error", "response.failed")
    ]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]


def test_usage_is_that_of_the_engine() -> None:
    assert write([ContentDelta("Yes")])[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 5},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_reasoning_is_sealed_where_it_is_asked_for() -> None:
    item = write([ReasoningDelta("Hm."), ReasoningDelta(" Yes.")], seals=True)[-1]["response"]["output"][0]
    assert open_reasoning(item["encrypted_content"]) == item["content"][0]["text"] == "Hm. Yes."
    assert "encrypted_content" not in write([ReasoningDelta("Hm.")])[-1]["response"]["output"][0]


@st.composite
def spoken(draw: st.DrawFn) -> list[tuple[str, list[str]]]:
    """Draw an output as parts, each of a kind and its tokens."""
    words = st.lists(st.sampled_from(["a", "ab", " ", "é", "Hi", "{a}", " a"]), min_size=1, max_size=5)
    kinds = draw(st.lists(st.sampled_from(("text", "call", "reasoning")), max_size=6))
    parts: list[tuple[str, list[str]]] = []
    for kind in kinds:
        if not parts or kind != "text" or parts[-1][0] != "text":
            parts.append((kind, draw(words)))
    return parts


@given(spoken(), st.data())
def test_log_probs_go_with_the_text_wherever_it_stands(parts: list[tuple[str, list[str]]], data: st.DataObject) -> None:
    """Text comes with its tokens; one inside of it may be shown in part before it comes."""
    scores, places, expected = TextLogProbs(), iter(range(100)), []
    taken: list[TokenLogProb] = []
    for kind, words in parts:
        tokens = [TokenLogProb(next(places), -1.0, (), word.encode()) for word in words]
        if kind != "text":
            scores.leave()
            scores.add(tokens)
            continue
        expected += tokens
        for index, (token, word) in enumerate(zip(tokens, words, strict=True)):
            early = data.draw(st.integers(0, len(word) - 1)) if index else 0
            if early:
                taken += scores.take(word[:early])
            scores.add([token])
            taken += scores.take(word[early:])
    assert taken == expected


def test_a_token_that_ends_a_call_and_begins_a_text_is_cut() -> None:
    scores = TextLogProbs()
    scores.leave()
    scores.add([TokenLogProb(1, -1.0, (), b"{}"), TokenLogProb(2, -2.0, (), b"}Do"), TokenLogProb(3, -3.0, (), b"ne")])
    taken = scores.take("Do") + scores.take("ne")
    assert [(entry.token, entry.bytes) for entry in taken] == [(2, b"Do"), (3, b"ne")]


def test_the_last_token_of_a_text_may_come_after_it() -> None:
    scores = TextLogProbs()
    assert scores.take("Do") == []
    scores.add([TokenLogProb(1, -1.0, (), b"Do")])
    assert [entry.token for entry in scores.rest()] == [1]
    assert scores.rest() == []
