"""Anthropic's SDK: messages, streams, tools, counted tokens, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from harness import Gateway, main, raised

QUESTION: Any = [{"role": "user", "content": "What is in-flight batching?"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}, "max_tokens": 24}
"""The SDK itself has no temperature any more; servers still take one."""
TOOL: Any = {
    "name": "weather",
    "description": "Look up the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


def client_of(gateway: Gateway, **options: Any) -> anthropic.Anthropic:
    """Return a client that refuses answers that are not of the API's types, and asks once."""
    settings: dict[str, Any] = {"api_key": gateway.key, "max_retries": 0, "timeout": 120} | options
    return anthropic.Anthropic(base_url=gateway.url, _strict_response_validation=True, **settings)


def check_a_message_has_all_its_parts(gateway: Gateway) -> None:
    """Blocks, reason of the end, usage."""
    answer = client_of(gateway).messages.create(model=gateway.model, messages=QUESTION, system="Be brief.", **GREEDY)
    [block] = answer.content
    assert block.type == "text"
    assert block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert 0 < answer.usage.output_tokens <= 24
    assert answer.usage.input_tokens > 0
    assert answer.role == "assistant"


def check_models_are_listed_and_retrieved(gateway: Gateway) -> None:
    """With all that the SDK's type wants."""
    client = client_of(gateway)
    first = next(iter(client.models.list(limit=20)))
    assert (first.id, first.type, first.lifecycle) == (gateway.model, "model", "active")
    assert client.models.retrieve(first.id) == first


def check_a_bearer_token_is_a_key_too(gateway: Gateway) -> None:
    """Claude Code sends one in place of ``x-api-key``."""
    client = client_of(gateway, api_key=None, auth_token=gateway.key)
    assert client.messages.create(model=gateway.model, messages=QUESTION, **GREEDY).content


def check_a_stream_tells_what_the_answer_tells(gateway: Gateway) -> None:
    """Raw events in their order; the helper puts the message together."""
    client = client_of(gateway)
    answer = client.messages.create(model=gateway.model, messages=QUESTION, **GREEDY)
    events: list[Any] = list(client.messages.create(model=gateway.model, messages=QUESTION, stream=True, **GREEDY))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(model=gateway.model, messages=QUESTION, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert answer.content[0].type == "text"
    assert text == answer.content[0].text
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == answer.usage.output_tokens


def check_stop_sequences(gateway: Gateway) -> None:
    """The sequence that ended a message is told."""
    client = client_of(gateway)
    block = client.messages.create(model=gateway.model, messages=QUESTION, **GREEDY).content[0]
    assert block.type == "text"
    word = block.text.split()[3]
    answer = client.messages.create(model=gateway.model, messages=QUESTION, stop_sequences=[word], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)


def check_a_tool_is_used_and_its_result_goes_back(gateway: Gateway) -> None:
    """With ``any`` and with a named tool, streamed and not."""
    client = client_of(gateway)
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
        wanted: dict[str, Any] = {
            "tools": [TOOL],
            "tool_choice": choice,
            "extra_body": {"temperature": 0},
            "max_tokens": 200,
        }
        answer = client.messages.create(model=gateway.model, messages=QUESTION, **wanted)
        assert answer.stop_reason == "tool_use"
        [use] = [block for block in answer.content if block.type == "tool_use"]
        assert use.input["city"] in ("Paris", "Rome")
        with client.messages.stream(model=gateway.model, messages=QUESTION, **wanted) as stream:
            streamed = stream.get_final_message()
        assert [one.input for one in streamed.content if one.type == "tool_use"] == [use.input]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is clear."}
    turn: Any = [
        *QUESTION,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(model=gateway.model, messages=turn, tools=[TOOL], **GREEDY).content


def check_tokens_are_counted_as_they_are_used(gateway: Gateway) -> None:
    """The count before is the usage after."""
    client = client_of(gateway)
    for options in ({}, {"system": "Be brief."}, {"tools": [TOOL]}):
        given: dict[str, Any] = {"model": gateway.model, "messages": QUESTION, **options}
        counted = client.messages.count_tokens(**given).input_tokens
        used = client.messages.create(**given, **GREEDY).usage
        cached = used.cache_read_input_tokens or 0
        assert counted == used.input_tokens + cached, (options, counted, used)


def check_errors_become_the_sdks_classes(gateway: Gateway) -> None:
    """With Anthropic's body: a type at the top, and the error below it."""
    client = client_of(gateway)
    error = raised(
        anthropic.NotFoundError,
        lambda: client.messages.create(model="nobody", messages=QUESTION, **GREEDY),
    )
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "not_found_error"
    error = raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(
            model=gateway.model, messages=QUESTION, max_tokens=8, extra_body={"temperature": -1}
        ),
    )
    assert "temperature" in error.body["error"]["message"]
    wrong = client_of(gateway, api_key="wrong")
    error = raised(
        anthropic.AuthenticationError,
        lambda: wrong.messages.create(model=gateway.model, messages=QUESTION, **GREEDY),
    )
    assert error.body["error"]["type"] == "authentication_error"


if __name__ == "__main__":
    main(globals())
