"""Requests of Anthropic's Messages API as chats: every field, every block, and what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT, CHAT_READER
from inflight.gateway.messages.fields import COUNT_TOKENS, MESSAGES
from inflight.gateway.messages.request import MessagesRequest, read_count_request, read_message_request
from inflight.gateway.turns import TurnRules
from tests.gateway.support.chat_fields import CHAT_FIELDS, HINTS_OF_CHATS, REFUSED_OF_CHATS
from tests.support.tables import each_row

RULES = TurnRules.of(None)
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}
CHAT_CALL = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}

ANTHROPIC_FIELDS = (
    "max_tokens messages model cache_control container diagnostics inference_geo metadata output_config service_tier "
    "speed stop_sequences system thinking tool_choice tools user_profile_id workspace_id stream temperature top_k "
    "top_p billing_policy compaction context_management fallback_credit_token fallbacks mcp_servers thread betas "
    "output_format"
).split()
"""All fields of anthropic 2.14's ``MessageCreateParams``, its betas and what older versions have."""
ANTHROPIC_COUNT_FIELDS = (
    "messages model cache_control output_config speed system thinking tool_choice tools user_profile_id workspace_id "
    "billing_policy compaction context_management mcp_servers betas"
).split()
"""All fields of its ``MessageCountTokensParams``, betas included."""
SERVED: dict[str, Any] = {
    "model": "demo",
    "messages": [USER],
    "max_tokens": 9,
    "system": "Be brief.",
    "tools": [TOOL],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "stream": True,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "me"},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 4,
    "min_p": 0.1,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 1.1,
    "seed": 7,
    "logit_bias": {"5": 1},
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 2,
    "bad_words": ["x"],
    "allowed_token_ids": [3],
    **CHAT_FIELDS,
    "priority": 2,
    "deadline_ms": 1000,
    "client_id": "me",
}
ACCEPTED: dict[str, Any] = {
    "cache_control": {"type": "ephemeral", "ttl": "1h"},
    "betas": ["context-management-2025-06-27"],
    "session_id": "me",
    "modalities": ["text"],
    "prompt_cache_key": "me",
    "prompt_cache_options": {"mode": "implicit"},
    "stream_options": {"include_usage": True},
}
HINTS: dict[str, Any] = {
    **{name: value for name, value in HINTS_OF_CHATS.items() if name != "thinking"},
    "safety_identifier": "me",
    "speed": "fast",
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "compaction": {"type": "summarize"},
    "user_profile_id": "x",
    "workspace_id": "x",
    "billing_policy": {},
    "diagnostics": {"previous_message_id": "msg_1"},
    "fallbacks": [{"model": "other"}],
    "fallback_credit_token": "x",
    "reasoning": {"effort": "low"},
}
REFUSED: dict[str, Any] = {
    "mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}],
    "container": "x",
    "inference_geo": "us",
    "thread": {"id": "x"},
    "stop": ["x"],
    "max_completion_tokens": 5,
    "response_format": {"type": "json_object"},
    **REFUSED_OF_CHATS,
    "user": "me",
    "parallel_tool_calls": False,
    "logprobs": True,
    "top_logprobs": 2,
    "prompt": "Hi",
    "input_ids": [1],
    "n_predict": 5,
    "max_new_tokens": 5,
    "moderation": {"model": "x"},
}
NEUTRAL: dict[str, Any] = {
    "speed": "standard",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "mcp_servers": [],
    "fallbacks": [],
    "n": 1,
    "service_tier": "standard_only",
    "guided_decoding_backend": "auto",
    "verbosity": "medium",
    "store": False,
}


def read(strict: bool = False, **fields: Any) -> MessagesRequest:
    return read_message_request(
        {"model": "demo", "max_tokens": 5, "messages": [USER]} | fields, strict=strict, rules=RULES
    )


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read(**fields)
    assert raised.value.status == 400
    return raised.value


def test_the_tables_have_every_field_of_anthropic_and_of_chats() -> None:
    assert set(ANTHROPIC_FIELDS) | set(CHAT) <= set(MESSAGES)
    assert set(COUNT_TOKENS) == set(MESSAGES)
    others = {name for name, field in MESSAGES.items() if field.state == "served" and COUNT_TOKENS[name] == field}
    assert others - {"add_special_tokens", "documents", "chat_template_kwargs", "output_format"} <= set(
        ANTHROPIC_COUNT_FIELDS
    )


def test_each_field_of_the_table_is_tried_here() -> None:
    tried = {"served": SERVED, "accepted": ACCEPTED, "refused": REFUSED, "hint": HINTS}
    assert {name: field.state for name, field in MESSAGES.items()} == {
        name: state for state, values in tried.items() for name in values
    }


@each_row("name, value", SERVED.items())
def test_a_served_field_changes_what_is_asked_for(name: str, value: Any) -> None:
    extra = {"tools": [TOOL]} if name == "tool_choice" else {}
    asked, without = read(**extra, **{name: value}), read(**extra)
    if name not in ("model", "messages"):
        assert asked != without
    CHAT_READER.read(asked.chat, strict=True, obeys=lambda name, value: {})
    assert asked.ignored == ()


@each_row("name, value", HINTS.items())
def test_a_hint_is_left_out_and_named(name: str, value: Any) -> None:
    asked = read(**{name: value})
    assert (asked.chat, asked.ignored) == (read().chat, (name,))
    with pytest.raises(ApiError) as raised:
        read(strict=True, **{name: value})
    assert raised.value.param == name


@each_row("name, value", ACCEPTED.items())
def test_an_accepted_field_asks_for_nothing(name: str, value: Any) -> None:
    assert read(strict=True, **{name: value}) == read()


@each_row("name, value", REFUSED.items())
def test_a_refused_field_is_named(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert (error.param, error.code) == (name, "unsupported_parameter")
    assert error.message.startswith(name)


@each_row("name, value", NEUTRAL.items())
def test_a_refused_field_or_a_hint_may_ask_for_nothing(name: str, value: Any) -> None:
    assert read(strict=True, **{name: value}) == read()


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(set(MESSAGES) - {"model", "messages", "max_tokens"})
    assert read(**nulls) == read()


def test_unknown_fields_are_named_with_their_paths() -> None:
    asked = read(messages=[USER | {"mood": "good"}], tools=[TOOL | {"size": 1}], extra=1)
    assert set(asked.ignored) == {"extra", "tools[0].size", "messages[0].mood"}
    with pytest.raises(ApiError, match="extra is not a known field"):
        read(strict=True, extra=1)


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


TOOL_MESSAGE = {"role": "tool", "tool_call_id": "toolu_1", "name": "add", "content": "3"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [user()]}, "messages[0].content"),
    ({"messages": [user({"text": "Hi"})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0].type"),
    ({"messages": [user(CALL)]}, "messages[0].content[0].type"),
    ({"messages": [user(text("Hi") | {"citations": [{}]})]}, "messages[0].content[0].citations"),
    ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [USER, assistant(RESULT)]}, "messages[1].content[0].type"),
    ({"messages": [USER, assistant(CALL | {"input": "x"})]}, "messages[1].content[0].input"),
    ({"messages": [USER, assistant({"type": "redacted_thinking", "data": "x"})]}, "messages[1].content[0].type"),
    ({"messages": [USER, assistant(CALL)]}, "messages[1]"),
    ({"messages": [USER, assistant()]}, "messages[1]"),
    (
        {"messages": [USER, assistant({"type": "thinking", "thinking": "", "signature": "Eq"}, text("x"))]},
        "messages[1].content[0].signature",
    ),
    (
        {"messages": [USER, assistant(CALL), user(RESULT | {"content": [{"type": "image", "source": {}}]})]},
        "messages[2].content[0].content[0].type",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "tool", "name": "bash"}},
     "tool_choice.name"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
    ({"tools": [TOOL | {"allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers"),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
     "tool_choice.disable_parallel_tool_use"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"output_config": {"effort": 5}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"format": SERVED["output_format"]}, "output_format": SERVED["output_format"]}, "output_format"),
    ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1]"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"cache_control": "eternal"}, "cache_control"),
]  # fmt: skip


@each_row("fields, param", WRONG)
def test_what_is_wrong_is_named_by_its_path(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert error.param == param
    assert error.message.startswith(param)


@each_row(
    "choice, chat_choice, parallel",
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}, None),
        ({"type": "auto", "disable_parallel_tool_use": False}, "auto", None),
    ],
)
def test_the_choice_of_tools_is_that_of_the_chat(choice: Any, chat_choice: Any, parallel: bool | None) -> None:
    chat = read(tools=[TOOL], tool_choice=choice).chat
    assert chat["tool_choice"] == chat_choice
    assert chat.get("parallel_tool_calls") is parallel
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]


INNER_HINTS: list[tuple[dict[str, Any], str]] = [
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [TOOL | {"input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
    ({"metadata": {"session": "x"}}, "metadata.session"),
    ({"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}, "tools[1].web_search_20250305"),
]


@each_row("fields, path", INNER_HINTS)
def test_a_hint_inside_of_a_field_is_left_out_and_named(fields: dict[str, Any], path: str) -> None:
    assert read(**fields).ignored == (path,)
    with pytest.raises(ApiError) as raised:
        read(strict=True, **fields)
    assert raised.value.param == path


def test_thinking_is_on_or_off_or_the_templates_own() -> None:
    assert read(thinking={"type": "enabled"}).thinks is True
    assert read(thinking={"type": "disabled"}).thinks is False
    assert read().thinks is None


def test_counting_takes_what_does_not_change_the_count() -> None:
    fields = {"model": "demo", "messages": [USER], "max_tokens": 5, "temperature": 0.5, "stream": True, "seed": 1}
    assert read_count_request(fields, strict=True, rules=RULES).chat["messages"] == [USER]
    with pytest.raises(ApiError, match="truncate_prompt_tokens"):
        read_count_request(fields | {"truncate_prompt_tokens": 5}, strict=True, rules=RULES)


def test_counting_takes_the_same_prompt() -> None:
    prompt = {"model": "demo", "system": "a", "messages": [USER], "tools": [TOOL]}
    assert read_count_request(prompt, strict=True, rules=RULES).chat == read(**prompt).chat


def test_messages_of_the_chat_are_named_by_their_place_in_the_request() -> None:
    asked = read(system="a", messages=[USER, USER, assistant(CALL), user(text("b"), RESULT), assistant(text("c"))])
    roles = ["system", "user", "assistant", "tool", "user", "assistant"]
    assert [message["role"] for message in asked.chat["messages"]] == roles
    places = ["system", "messages[0]", "messages[2]", "messages[3].content[1]", "messages[3]", "messages[4]"]
    for index, place in enumerate(places):
        assert asked.names.path(f"messages[{index}].content is odd") == f"{place}.content is odd"
    assert asked.names.path("messages[9] is odd") == "messages[9] is odd"
