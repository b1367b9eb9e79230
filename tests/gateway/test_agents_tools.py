"""Calls of tools through the real engine: what a grammar enforces, both APIs read, however it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.support.gateways import Beside, beside
from tests.gateway.test_agents_server import answer, model
from tests.gateway.test_messages_events import replay as replay_message
from tests.gateway.test_responses_events import replay as replay_items
from tests.support.tables import each_row

Json = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
RESPONSE: Json = {
    "input": "How is the weather in Paris?",
    "tools": TOOLS,
    "seed": 5,
    "max_output_tokens": 400,
    "chat_template_kwargs": {"enable_thinking": False},
}
"""Without thinking: no grammar bounds how long a model thinks."""
MESSAGE: Json = {
    "messages": [{"role": "user", "content": "How is the weather in Paris?"}],
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
    "seed": 5,
    "max_tokens": 400,
    "thinking": {"type": "disabled"},
}


@pytest.fixture(scope="module")
def caller() -> Iterator[Beside]:
    with beside() as running:
        yield running


def check(arguments: Json) -> None:
    assert set(arguments) == {"city", "days"}
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in range(1, 10)


@pytest.mark.proof
@each_row(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
def test_a_response_has_the_call_that_is_asked_for(caller: Beside, choice: Any) -> None:
    body = RESPONSE | {"tool_choice": choice, "parallel_tool_calls": False}
    response = answer(caller, "/v1/responses", body)
    [call] = [item for item in response["output"] if item["type"] == "function_call"]
    check(json.loads(call["arguments"]))
    assert (response["status"], call["status"]) == ("completed", "completed")
    [streamed] = replay_items(answer(caller, "/v1/responses", body | {"stream": True}))
    assert (streamed["name"], streamed["arguments"]) == (call["name"], call["arguments"])


@each_row("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}])
def test_a_message_has_the_call_that_is_asked_for(caller: Beside, choice: Json) -> None:
    body = MESSAGE | {"tool_choice": choice}
    message = answer(caller, "/v1/messages", body)
    [call] = message["content"]
    check(call["input"])
    assert message["stop_reason"] == "tool_use"
    streamed = replay_message(answer(caller, "/v1/messages", body | {"stream": True}))
    assert [block["input"] for block in streamed["content"]] == [call["input"]]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "Sunny."}
    turns = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    goes_on = answer(caller, "/v1/messages", MESSAGE | {"messages": MESSAGE["messages"] + turns, "max_tokens": 5})
    assert goes_on["usage"]["output_tokens"] > 0


def refused(caller: Beside, path: str, body: Json) -> Json:
    """Return the error of a request."""
    with caller.client() as client:
        response = client.post(path, json={"model": model(caller), **body})
        assert response.status_code == 400, response.text
        return dict(response.json()["error"])


BAD: Json = {"type": "object", "properties": {"days": {"type": "integer", "not": {"const": 1}}}}


@pytest.mark.proof
@each_row(
    ("schema", "place", "said"),
    [
        (BAD, "", ": not at /properties/days: it cannot be enforced"),
        ({"type": "array"}, ".type", ' is "array"; it must be "object"'),
    ],
)
def test_a_bad_schema_is_refused_with_its_tool_in_every_api(
    caller: Beside, schema: Json, place: str, said: str
) -> None:
    good = [RESPONSE["tools"][0] | {"name": name} for name in ("one", "two")]
    tools = [*good, {"type": "function", "name": "three", "parameters": schema}]
    chat = [{"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}} for tool in tools]
    message = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in tools]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "three"}]}
    requests: list[tuple[str, Json, str]] = [
        (
            "/v1/chat/completions",
            {"messages": MESSAGE["messages"], "tools": chat, "tool_choice": "required"},
            "tools[2].function.parameters",
        ),
        ("/v1/responses", RESPONSE | {"tools": tools, "tool_choice": "required"}, "tools[2].parameters"),
        ("/v1/responses", RESPONSE | {"tools": tools, "tool_choice": allowed}, "tools[2].parameters"),
        ("/v1/messages", MESSAGE | {"tools": message, "tool_choice": {"type": "any"}}, "tools[2].input_schema"),
    ]
    for path, body, field in requests:
        error = refused(caller, path, body)
        assert error["message"].startswith(f"{field}{place}{said}"), error
        assert error.get("param", f"{field}{place}") == f"{field}{place}"  # Anthropic's errors have no such field
