"""Requests of the Responses API as chats: every field, every item, and what is refused, by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from inflight.gateway.chat_guides import can_enforce
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT, CHAT_READER
from inflight.gateway.responses.conversation import MOST_CUT
from inflight.gateway.responses.fields import RESPONSES
from inflight.gateway.responses.request import ResponsesRequest, read_request
from inflight.gateway.responses.tools import Enforces
from inflight.gateway.turns import TurnRules
from inflight.resources import DEMO
from inflight.settings.guided import MOST_GUIDE_BYTES
from inflight.text.output.families import HermesFormat
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.chat_fields import CHAT_FIELDS, HINTS_OF_CHATS, REFUSED_OF_CHATS
from tests.support.tables import each_row

TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
USER = {"role": "user", "content": "Hi"}

OPENAI_FIELDS = (
    "access_programs background background_options context_management conversation image include input instructions "
    "max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id prompt "
    "prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store "
    "stream stream_options temperature text tool_choice tools top_logprobs top_p truncation user"
).split()
"""All fields of openai-python 3.57's ``ResponseCreateParams``."""
SERVED: dict[str, Any] = {
    "model": "demo",
    "input": "Hi",
    "instructions": "Be brief.",
    "max_output_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "logit_bias": {"5": 1},
    "stop": ["x"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ["x"],
    "allowed_token_ids": [3],
    **CHAT_FIELDS,
    "priority": 2,
    "deadline_ms": 1000,
    "client_id": "me",
    "user": "me",
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results"],
    "tools": [TOOL],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "stream": True,
    "metadata": {"a": "b"},
    "safety_identifier": "me",
}
ACCEPTED: dict[str, Any] = {
    "prompt_cache_key": "me",
    "prompt_cache_options": {"mode": "implicit"},
    "max_tool_calls": 3,
    "client_metadata": {"a": "b"},
    "session_id": "me",
    "modalities": ["text"],
    "stream_options": {"include_obfuscation": False},
}
HINTS: dict[str, Any] = {
    **HINTS_OF_CHATS,
    "truncation": "auto",
    "context_management": [{"type": "compaction"}],
}
REFUSED: dict[str, Any] = {
    "previous_response_id": "resp_1",
    "previous_input_messages": [],
    "enable_response_messages": True,
    "conversation": "conv_1",
    "background": True,
    "background_options": {"completion_window": "2h"},
    "prompt": {"id": "pmpt_1"},
    "moderation": {"model": "omni-moderation-latest"},
    "access_programs": {"cyber": "standard"},
    "image": {"context_compression": "enabled"},
    "messages": [USER],
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "response_format": {"type": "json_object"},
    "logprobs": True,
    **REFUSED_OF_CHATS,
    "input_ids": [1],
    "n_predict": 5,
    "max_new_tokens": 5,
}
NEUTRAL: dict[str, Any] = {
    "store": False,
    "background": False,
    "truncation": "disabled",
    "context_management": [],
    "logprobs": False,
    "n": 1,
    "service_tier": "auto",
    "guided_decoding_backend": "auto",
}


@functools.cache
def enforces() -> Enforces:
    """Return what the gateway of the demo's checkpoint knows of schemas."""
    form = HermesFormat(Tokenizer.from_checkpoint(DEMO / "model"))
    return functools.partial(can_enforce, form, MOST_GUIDE_BYTES)


def read(strict: bool = False, **fields: Any) -> ResponsesRequest:
    body = {"model": "demo", "input": "Hi"} | fields
    return read_request(body, strict=strict, rules=TurnRules.of(None), enforces=enforces())


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(**fields)
    assert raised.value.status == 400
    return raised.value


def test_the_table_has_every_field_of_openai_and_of_chats() -> None:
    assert set(OPENAI_FIELDS) | set(CHAT) <= set(RESPONSES)


def test_each_field_of_the_table_is_tried_here() -> None:
    tried = {"served": SERVED, "accepted": ACCEPTED, "refused": REFUSED, "hint": HINTS}
    assert {name: field.state for name, field in RESPONSES.items()} == {
        name: state for state, values in tried.items() for name in values
    }


@each_row("name, value", SERVED.items())
def test_a_served_field_changes_the_chat_or_the_response(name: str, value: Any) -> None:
    extra = {"tools": [TOOL]} if name == "tool_choice" else {}
    asked, without = read(**extra, **{name: value}), read(**extra)
    if name not in ("model", "input"):
        assert asked != without
    CHAT_READER.read(asked.chat, strict=True, obeys=lambda name, value: {})
    assert asked.ignored == ()


@each_row("name, value", HINTS.items())
def test_a_hint_is_left_out_and_named(name: str, value: Any) -> None:
    asked = read(**{name: value})
    assert (asked.chat, asked.shown, asked.ignored) == (read().chat, read().shown, (name,))
    with pytest.raises(ApiError) as raised:
        read(strict=True, **{name: value})
    assert raised.value.param == name


INNER_HINTS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL | {"output_schema": {"type": "object"}}]}, "tools[0].output_schema"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"reasoning": {"colour": "red"}}, "reasoning.colour"),
]


@each_row("fields, path", INNER_HINTS)
def test_a_hint_inside_of_a_field_is_left_out_and_named(fields: dict[str, Any], path: str) -> None:
    assert read(**fields).ignored == (path,)
    with pytest.raises(ApiError) as raised:
        read(strict=True, **fields)
    assert raised.value.param == path


def test_verbosity_is_the_chats() -> None:
    asked = read(text={"verbosity": "low"})
    assert (asked.chat["verbosity"], asked.ignored) == ("low", ())


@each_row("name, value", ACCEPTED.items())
def test_an_accepted_field_leaves_the_chat_as_it_is(name: str, value: Any) -> None:
    assert read(**{name: value}).chat == read().chat
    assert read(strict=True, **{name: value}).ignored == ()


@each_row("name, value", REFUSED.items())
def test_a_refused_field_is_named(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message.startswith(name)


@each_row("name, value", NEUTRAL.items())
def test_a_refused_field_or_a_hint_may_ask_for_nothing(name: str, value: Any) -> None:
    assert read(strict=True, **{name: value}) == read()


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(set(RESPONSES) - {"model", "input"})
    assert read(**nulls) == read()
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi", "annotations": None}]}
    assert read(input=[item | {"id": None, "status": None}]).chat["messages"] == [USER]


def test_unknown_fields_are_named_with_their_paths() -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "Hi", "colour": 1}], "mood": "good"}
    asked = read(input=[item], tools=[TOOL | {"size": 1}], extra=1)
    assert set(asked.ignored) == {"extra", "tools[0].size", "input[0].mood", "input[0].content[0].colour"}
    assert asked.chat["messages"] == [USER]
    with pytest.raises(ApiError, match="extra is not a known field"):
        read(strict=True, extra=1)


def test_the_response_repeats_the_request_truthfully() -> None:
    shown = read(store=None, metadata={"a": "b"}, tools=[TOOL], tool_choice="required").shown
    assert shown["store"] is False
    assert shown["metadata"] == {"a": "b"}
    assert shown["tools"] == [TOOL | {"description": None, "strict": False}]
    assert (shown["tool_choice"], shown["truncation"], shown["background"]) == ("required", "disabled", False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["Hi"]}, "input[0]"),
    ({"input": [{"content": "Hi"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"text": "Hi"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": [{"type": "odd", "text": "Hi"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
    ({"input": [USER, OUTPUT]}, "input[1].call_id"),
    ({"input": [CALL, OUTPUT | {"call_id": None}]}, "input[1].call_id"),
    ({"input": [CALL, OUTPUT | {"output": [{"type": "input_image", "image_url": "x"}]}]}, "input[1].output[0].type"),
    ({"input": [CALL | {"arguments": '{"a": }'}]}, "input[0].arguments"),
    ({"input": [CALL | {"arguments": "[1]"}]}, "input[0].arguments"),
    ({"input": [CALL | {"arguments": '{"a": "' + "x" * MOST_CUT}]}, "input[0].arguments"),
    ({"input": [CALL | {"arguments": '{"a": "' + "x" * (MOST_CUT // 2)}] * 2}, "input[1].arguments"),
    ({"input": [CALL | {"arguments": '{"a": NaN}'}]}, "input[0].arguments"),
    ({"input": [CALL | {"caller": {"type": "program", "caller_id": "x"}}]}, "input[0].caller"),
    ({"input": [{"role": "assistant", "content": "Yes.", "phase": "first"}]}, "input[0].phase"),
    ({"input": [CALL | {"name": ""}]}, "input[0].name"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format.definition"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [TOOL | {"async": True}]}, "tools[0].async"),
    ({"tools": [TOOL | {"allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "subtract"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
    ({"text": {"verbosity": 5}}, "text.verbosity"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"include": ["everything"]}, "include[0]"),
    ({"reasoning": {"summary": 5}}, "reasoning.summary"),
    ({"reasoning": "low"}, "reasoning"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"temperature": "hot"}, "temperature"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"model": 5}, "model"),
    ({"input": None}, "input"),
]  # fmt: skip


@each_row("fields, param", WRONG)
def test_what_is_wrong_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert error.message.startswith(param)


def test_a_choice_among_allowed_tools_leaves_the_others_out() -> None:
    other = TOOL | {"name": "other"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    asked = read(tools=[TOOL, other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in asked.chat["tools"]] == ["other"]
    assert asked.chat["tool_choice"] == "required"
    assert [tool["name"] for tool in asked.shown["tools"]] == ["add", "other"]
    assert asked.shown["tool_choice"] == choice


def test_a_named_function_and_its_schema_are_those_of_the_chat() -> None:
    asked = read(
        tools=[TOOL | {"description": "Adds.", "strict": True}], tool_choice={"type": "function", "name": "add"}
    )
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    assert asked.chat["tools"] == [{"type": "function", "function": function}]
    assert asked.chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_a_schema_of_the_text_is_that_of_the_chat() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"enum": [None, 1]}, "strict": True}
    asked = read(text={"format": form})
    schema = {"name": "x", "schema": {"enum": [None, 1]}, "strict": True}
    assert asked.chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert asked.shown["text"]["format"] == form | {"description": None}


def test_log_probs_come_by_include_or_by_their_number() -> None:
    by_include = read(include=["message.output_text.logprobs"])
    assert (by_include.chat["logprobs"], by_include.chat["top_logprobs"]) == (True, 0)
    by_number = read(top_logprobs=3)
    assert (by_number.chat["logprobs"], by_number.chat["top_logprobs"]) == (True, 3)
    assert "logprobs" not in read(top_logprobs=0).chat


@each_row(
    "told, name",
    [
        ("messages[0] is odd", "instructions is odd"),
        ("messages[2].content is odd", "input[2].content is odd"),
        ("messages: the chat template refuses them: no messages", "input: the chat template refuses them: no messages"),
        ("5 tokens (5 in the messages)", "5 tokens (5 in the input)"),
        ("tools[0].function.name is odd", "tools[1].name is odd"),
        ("'f' has 'pattern' at /properties/messages/items", "'f' has 'pattern' at /properties/messages/items"),
        ("tool_choice.function.name is 'messages'", "tool_choice.name is 'messages'"),
    ],
)
def test_what_chats_tell_is_told_by_the_names_of_the_request(told: str, name: str) -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}
    asked = read(
        instructions="a",
        input=[{"role": "developer", "content": "b"}, USER, thought, {"role": "assistant", "content": "Yes."}],
        tools=[TOOL, TOOL | {"name": "b"}],
        tool_choice=choice,
    )
    assert asked.names.path(told) == name
