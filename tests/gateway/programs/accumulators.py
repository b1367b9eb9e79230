"""Reads streams of events, from stdin as JSON, as the SDKs of OpenAI and Anthropic do, and prints what they dislike.

A stream is a list of events and the answer that they must add up to: ``{"responses": [...], "messages": [...]}``. Each
event must be of the SDK's own types; then the SDK's own accumulator takes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from anthropic._models import construct_type as message_type
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from openai._models import construct_type as response_type
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

Json = dict[str, Any]


def dislikes_of_a_response(events: list[Json], answer: Json) -> Iterator[str]:
    """Yield what OpenAI's SDK dislikes of a stream; at the event ``error`` it raises, and reads no further."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        yield from _mismatch(adapter, event)
    for event in events:
        if event["type"] == "error":
            return
        state.handle_event(response_type(type_=ResponseStreamEvent, value=event))
    yield from _mismatch(TypeAdapter(Response), answer)
    final = state._completed_response
    if events[-1]["type"] == "response.completed" and final is None:
        yield "the helper has no response at the end"
    made = [state._completed_output[index].to_dict() for index in sorted(state._completed_output)]
    if made != answer["output"]:
        yield f"the items are {made}, and not {answer['output']}"
    written = [_text(item.to_dict()) for item in state._ResponseStreamState__current_snapshot.output]
    if written != [_text(item) for item in answer["output"]]:
        yield f"the deltas add up to {written}, and not {answer['output']}"


def _text(item: Json) -> str:
    """Return what an item says, as far as the helper adds it up: reasoning it leaves out."""
    if item["type"] == "message":
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", ""))


def dislikes_of_a_message(events: list[Json], answer: Json) -> Iterator[str]:
    """Yield what Anthropic's SDK dislikes of a stream."""
    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    snapshot: Any = None
    buffers: Any = {}
    for event in events:
        if event["type"] == "ping":
            continue
        yield from _mismatch(adapter, event)
        one: Any = message_type(type_=RawMessageStreamEvent, value=event)
        snapshot = accumulate_event(event=one, current_snapshot=snapshot, json_bufs=buffers)
    yield from _mismatch(TypeAdapter(Message), answer)
    if (made := snapshot.to_dict()) != answer:
        yield f"the message is {made}, and not {answer}"


def _mismatch(adapter: TypeAdapter[Any], value: Json) -> Iterator[str]:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        yield f"{json.dumps(value)[:300]} is not of the SDK's types: {str(error)[:2000]}"


def main() -> None:
    """Print a line of JSON for each stream: its name and what is disliked."""
    streams = json.load(sys.stdin)
    readers = {"responses": dislikes_of_a_response, "messages": dislikes_of_a_message}
    for kind, reader in readers.items():
        for name, events, answer in streams[kind]:
            try:
                disliked = list(reader(events, answer))
            except Exception as error:  # what an accumulator raises is what its user would see
                disliked = [f"{type(error).__name__}: {error}"]
            print(json.dumps({"stream": f"{kind}: {name}", "disliked": disliked}))


if __name__ == "__main__":
    main()
