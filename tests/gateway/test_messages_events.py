"""Events of Anthropic's messages: their order, and that they add up to the message, however the output was cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given

from inflight.gateway.messages.events import UNSIGNED, MessageUsage, MessageWriter
from inflight.gateway.opaque_reasoning import open_reasoning
from inflight.gateway.partial_json import complete_fields
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from tests.gateway.support.outputs import ARGUMENTS, cut_outputs
from tests.support.tables import each_row

Json = dict[str, Any]
FIRST = MessageUsage(prompt=10, cached=0, written=0, output=0, thinking=0)
USAGE = MessageUsage(prompt=10, cached=4, written=5, output=7, thinking=2)


def write(outputs: list[OutputEvent], omits: bool = False) -> tuple[list[Json], Json]:
    writer = MessageWriter("demo", omits_thinking=omits)
    events = writer.begin(FIRST)
    for output in outputs:
        events += writer.add(output)
    last, message = writer.finish("end_turn", None, USAGE)
    return events + last, message


def replay(events: list[Json]) -> Json:
    """Return the message that the events add up to, as Anthropic's clients do."""
    message: Json = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = dict(event["message"])
                message["content"] = []
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                _apply(message["content"][event["index"]], event["delta"], inputs, event["index"])
            case "message_delta":
                message |= event["delta"]
                message["usage"] = message["usage"] | event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = complete_fields(text)
    return message


def _apply(block: Json, delta: Json, inputs: dict[int, str], index: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            inputs[index] = inputs.get(index, "") + delta["partial_json"]


def without_ids(message: Json) -> Json:
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": blocks}


@given(cut_outputs())
def test_events_add_up_to_the_message_and_do_not_depend_on_the_pieces(
    drawn: tuple[list[OutputEvent], list[OutputEvent]],
) -> None:
    whole, pieces = drawn
    for omits in (False, True):
        events, message = write(pieces, omits)
        assert replay(events) == message
        assert without_ids(message) == without_ids(write(whole, omits)[1])


def test_the_order_of_events() -> None:
    outputs = [ReasoningDelta("Hm."), ContentDelta("Yes"), CallStart(0, "f"), ArgumentsDelta(0, '{"a": 1}')]
    events, message = write(outputs)
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2),
        ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("message_delta", None),
        ("message_stop", None),
    ]
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": UNSIGNED}
    assert text == {"type": "text", "text": "Yes"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})


def test_omitted_thinking_travels_in_its_signature() -> None:
    events, message = write([ReasoningDelta("Hm."), ReasoningDelta(" Yes."), ContentDelta("Yes.")], omits=True)
    block = message["content"][0]
    assert (block["thinking"], open_reasoning(block["signature"])) == ("", "Hm. Yes.")
    assert not [event for event in events if event.get("delta", {}).get("type") == "thinking_delta"]


def test_usage_counts_apart_what_the_cache_had_and_what_was_written_to_it() -> None:
    unknown = replace(USAGE, written=None).as_json()
    assert (unknown["input_tokens"], unknown["cache_creation_input_tokens"]) == (6, None)
    assert write([])[1]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 5,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


def test_a_call_that_is_cut_has_its_complete_fields() -> None:
    message = write([CallStart(0, "f"), ArgumentsDelta(0, '{"a": [1, 2], "b": "cut he')])[1]
    assert message["content"][0]["input"] == {"a": [1, 2]}


@each_row(
    "pieces, calls",
    [
        ([], False),
        (["{}"], True),
        (['{"a'], False),
        (["{}", '{"a'], False),
        (['{"a', "{}"], False),
        (['{"a', "{}", "{}"], False),
        (["{}", "{}"], True),
    ],
)
def test_calls_are_to_be_made_where_all_are_complete(pieces: list[str], calls: bool) -> None:
    """A stop sequence, too, may cut one."""
    writer = MessageWriter("demo")
    for index, arguments in enumerate(pieces):
        writer.add(CallStart(index, "f"))
        writer.add(ArgumentsDelta(index, arguments))
    assert writer.calls is calls


@each_row(
    "text, fields",
    [
        ("", {}),
        ("{", {}),
        ('{"a"', {}),
        ('{"a": ', {}),
        ('{"a": 12', {"a": 12}),
        ('{"a": 12, "b', {"a": 12}),
        ('{"a": "x\\"y', {}),
        ('{"a": "x,{[", "b": tr', {"a": "x,{["}),
        ('{"a": {"b": ', {"a": {}}),
        ('{"a": [1, {"b": 2}, {"c": "', {"a": [1, {"b": 2}, {}]}),
        ("[1, 2", {}),
    ],
)
def test_complete_fields_of_a_beginning(text: str, fields: Json) -> None:
    assert complete_fields(text) == fields


@each_row("text", ARGUMENTS)
def test_every_beginning_of_arguments_is_read(text: str) -> None:
    whole = json.loads(text)
    assert complete_fields(text) == whole
    for end in range(len(text)):
        names = list(complete_fields(text[:end]))
        assert names == list(whole)[: len(names)]
