"""Fields inside of the fields of chats: each is known, or named by its path, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from inflight.errors import InvalidRequest
from inflight.gateway.errors import ApiError
from inflight.gateway.field_tables import CHAT_READER, COMPLETION_READER
from inflight.gateway.fields import Reader
from inflight.gateway.guides import read_guide
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.tools import read_tools
from inflight.text.chat import ChatTemplate
from inflight.text.messages import check_messages
from tests.gateway.test_messages_request import read as read_message
from tests.gateway.test_responses_request import read as read_response
from tests.support.tables import each_row

FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
CALL = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "add", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "x": {"y": 1}}
KNOWN: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        {"role": "user", "content": "a", "name": "me", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "reasoning": "a", "tool_calls": [CALL], "annotations": []},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "description": "b", "strict": True, "schema": SCHEMA},
    },
    "chat_template_kwargs": {"any": {"thing": 1}},
    "guided_json": SCHEMA,
}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def test_what_is_known_is_not_named() -> None:
    assert CHAT_READER.read({"model": "m", **KNOWN}, strict=True).ignored == ()


def put(value: Any, path: list[Any], new: Any) -> Any:
    """Return a copy of a value with something new at a path."""
    if not path:
        return new
    if isinstance(value, list):
        return [put(one, path[1:], new) if place == path[0] else one for place, one in enumerate(value)]
    return {**value, path[0]: put(value.get(path[0], {}), path[1:], new)}


READERS: dict[str, tuple[Reader, dict[str, Any]]] = {
    "chat": (CHAT_READER, {"model": "m", **KNOWN}),
    "completions": (COMPLETION_READER, {"model": "m", "prompt": "a", "response_format": KNOWN["response_format"]}),
}
UNKNOWN = [
    ("chat", "messages[1].x", ["messages", 1, "x"]),
    ("chat", "messages[0].content[0].x", ["messages", 0, "content", 0, "x"]),
    ("chat", "messages[2].tool_calls[0].x", ["messages", 2, "tool_calls", 0, "x"]),
    ("chat", "messages[2].tool_calls[0].function.x", ["messages", 2, "tool_calls", 0, "function", "x"]),
    ("chat", "tools[0].x", ["tools", 0, "x"]),
    ("chat", "tools[0].function.x", ["tools", 0, "function", "x"]),
    ("chat", "tool_choice.x", ["tool_choice", "x"]),
    ("chat", "tool_choice.function.x", ["tool_choice", "function", "x"]),
    ("chat", "tool_choice.allowed_tools.tools[0].x", ["tool_choice", "allowed_tools", "tools", 0, "x"]),
    ("chat", "response_format.x", ["response_format", "x"]),
    ("chat", "response_format.json_schema.x", ["response_format", "json_schema", "x"]),
    ("completions", "response_format.json_schema.x", ["response_format", "json_schema", "x"]),
]


@each_row("endpoint, name, path", UNKNOWN)
def test_what_is_not_known_is_named_by_its_path_and_refused_where_fields_are_strict(
    endpoint: str, name: str, path: list[Any]
) -> None:
    reader, body = READERS[endpoint]
    assert reader.read(put(body, path, {"a": 1})).ignored == (name,)
    assert reader.read(put(body, path, None)).ignored == ()
    with pytest.raises(ApiError) as caught:
        reader.read(put(body, path, 1), strict=True)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unknown_parameter")


@pytest.mark.parametrize("name", ["function_call", "audio", "refusal"])
def test_what_messages_have_and_nothing_serves_is_refused(name: str) -> None:
    message = {"role": "assistant", "content": "a", name: None}
    assert CHAT_READER.read(CHAT | {"messages": [message]}).ignored == ()
    with pytest.raises(ApiError) as caught:
        CHAT_READER.read(CHAT | {"messages": [message | {name: {"id": "a"}}]})
    assert (caught.value.param, caught.value.code) == (f"messages[0].{name}", "unsupported_parameter")


def test_a_cache_is_not_warmed_alone_nor_compared() -> None:
    body = CHAT | {"prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False}}
    assert CHAT_READER.read(body, strict=True).ignored == ()
    with pytest.raises(ApiError) as caught:
        CHAT_READER.read(CHAT | {"prompt_cache_options": {"prewarm": True}})
    assert (caught.value.param, caught.value.code) == ("prompt_cache_options.prewarm", "unsupported_parameter")
    compared = CHAT_READER.read(CHAT | {"prompt_cache_options": {"comparison_response_id": "resp_1"}})
    assert compared.ignored == ("prompt_cache_options.comparison_response_id",)


@each_row(
    "template, reads",
    [
        ("{{ messages[0].tool_plan }}", True),
        ("{{ messages[0]['tool_plan'] }}", True),
        ('{{ messages[0].get("tool_plan") }}', True),
        ("{{ messages[0].tool_plans }}", False),
        ("{{ tool_plan }}", False),
    ],
)
def test_what_the_chat_template_reads_has_an_effect(template: str, reads: bool) -> None:
    message = {"role": "assistant", "content": "a", "tool_plan": "b"}
    fields = CHAT_READER.read(CHAT | {"messages": [message]}, spared=ChatTemplate(template, {}).reads)
    assert fields.ignored == (() if reads else ("messages[0].tool_plan",))


def test_what_the_chat_template_does_not_get_has_no_effect_whatever_it_reads() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "plan": 1}], "plan": 1}
    call = CALL | {"plan": 1, "function": CALL["function"] | {"plan": 1}}
    asked = {
        "messages": [message, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": FUNCTION | {"plan": 1}, "plan": 1}],
        "response_format": {"type": "text", "plan": 1},
        "tool_choice": {**NAMED, "plan": 1},
    }
    fields = CHAT_READER.read(CHAT | asked, spared=lambda name: name == "plan")
    expected = "messages[0].content[0] tools[0].function tools[0] response_format tool_choice".split()
    assert fields.ignored == tuple(f"{place}.plan" for place in expected)


def test_a_field_of_many_messages_is_named_once() -> None:
    messages = [{"role": "user", "content": "Hi", "x": 1}, {"role": "user", "content": "Hi", "x": 1, "y": 1}]
    assert CHAT_READER.read(CHAT | {"messages": messages}).ignored == ("messages[0].x", "messages[1].y")


def test_agents_fields_inside_of_others_are_refused_where_fields_are_strict() -> None:
    turns = [{"role": "user", "content": "Hi", "x": 1}]
    reads: list[tuple[Any, dict[str, Any], str]] = [
        (read_response, {"input": turns}, "input[0].x"),
        (read_message, {"messages": turns}, "messages[0].x"),
    ]
    for read, fields, name in reads:
        assert read(**fields).ignored == (name,)
        with pytest.raises(ApiError) as caught:
            read(strict=True, **fields)
        assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")


def test_places_in_lists_are_no_labels() -> None:
    metrics = GatewayMetrics()
    metrics.ignored_fields(["messages[0].x", "messages[17].x", "a b", "y" * 65])
    page = metrics.page().decode()
    assert 'ignored_fields_total{field="messages[].x"} 2.0' in page
    assert 'ignored_fields_total{field="other"} 2.0' in page


@each_row(
    "given, param",
    [
        ({"type": "text", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}}, "structures": []}, "structures"),
        ({"type": "json_object", "triggers": ["<a>"]}, "triggers"),
        ({"type": "text", "format": {"type": "any_text"}}, "format"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, "schema"),
        ({"type": "structural_tag", "format": {}, "schema": {}}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, "json_schema.name"),
        ({"type": "json_schema", "json_schema": {"description": 5, "schema": {}}}, "json_schema.description"),
        ({"type": "json_schema", "json_schema": {"strict": "yes", "schema": {}}}, "json_schema.strict"),
    ],
)
def test_a_schema_that_would_not_count_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_guide(CHAT_READER.read(CHAT | {"response_format": given}), 1000)
    assert caught.value.param == f"response_format.{param}"


def test_a_field_with_two_names_says_one_thing() -> None:
    fields = CHAT_READER.read(CHAT | {"max_tokens": 5, "max_completion_tokens": 5})
    assert fields.either("max_completion_tokens", "max_tokens") == 5
    fields = CHAT_READER.read(CHAT | {"max_tokens": 5, "max_completion_tokens": 6})
    with pytest.raises(ApiError) as caught:
        fields.either("max_completion_tokens", "max_tokens")
    assert (caught.value.status, caught.value.param) == (400, "max_tokens")
    assert CHAT_READER.read(CHAT).either("max_completion_tokens", "max_tokens") is None


def test_a_null_inside_of_a_tool_or_a_choice_is_an_absent_field() -> None:
    tool = {"type": None, "function": {"name": "add", "description": None, "parameters": None, "strict": None}}
    choice = {"type": None, "function": {"name": "add"}}
    tools, chosen = read_tools(CHAT_READER.read(CHAT | {"tools": [tool], "tool_choice": choice}, strict=True))
    assert [one.name for one in tools] == ["add"]
    assert chosen.kind == "named"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": None}}
    guide = read_guide(CHAT_READER.read(CHAT | {"response_format": form}), 1000)
    assert guide is not None
    assert guide.guide.text == "{}"
    [message] = check_messages([{"role": "assistant", "content": "a", "tool_calls": [{**CALL, "type": None}]}])
    assert message["tool_calls"][0]["type"] == "function"


def test_a_tool_with_the_name_of_another_is_named() -> None:
    tools = [{"type": "function", "function": FUNCTION}] * 2
    with pytest.raises(ApiError) as caught:
        read_tools(CHAT_READER.read(CHAT | {"tools": tools}))
    assert caught.value.param == "tools[1].function.name"


def test_an_answer_that_was_cut_off_in_its_reasoning_is_taken_back() -> None:
    [message] = check_messages([{"role": "assistant", "content": None, "reasoning": "Hm.", "reasoning_content": "Hm."}])
    assert (message["content"], message["reasoning_content"]) == ("", "Hm.")
    with pytest.raises(InvalidRequest, match=r"messages\[0\].content is null"):
        check_messages([{"role": "user", "content": None, "reasoning": "Hm."}])


def test_the_end_of_a_prefix_may_be_marked_in_a_response_too() -> None:
    part = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert read_response(strict=True, input=[{"role": "user", "content": [part]}]).ignored == ()
