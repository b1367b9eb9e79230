"""An answer that ends inside of a call, or that only quotes one, does not say that it has called a tool."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gateway.support.gateways import Inside
from tests.gateway.support.scripted import Script, scripted

FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT: dict[str, Any] = {
    "model": "model",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
}
MESSAGE: dict[str, Any] = {
    "model": "model",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Script]]:
    with scripted(model_name="model") as running:
        yield running


@pytest.mark.parametrize(
    ("text", "reason", "chat_says", "message_says"),
    [
        (CALL, "stop", "tool_calls", "tool_use"),
        (CALL, "length", "length", "max_tokens"),
        (CALL[:-18], "stop", "stop", "end_turn"),
        (CALL[:-18], "length", "length", "max_tokens"),
        (f'{CALL}<tool_call>{{"name": "add", "arguments": {{"a": ?}}}}</tool_call> Hm.', "stop", "stop", "end_turn"),
    ],
)
def test_the_end_says_whether_there_are_calls(
    served: tuple[Inside, Script], text: str, reason: str, chat_says: str, message_says: str
) -> None:
    running, script = served
    vars(script).update(vars(Script(text, reason)))
    with running.client() as client:
        [choice] = client.post("/v1/chat/completions", json=CHAT).json()["choices"]
        message = client.post("/v1/messages", json=MESSAGE).json()
    assert choice["finish_reason"] == chat_says
    assert message["stop_reason"] == message_says
    arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    if chat_says == "tool_calls":
        assert [json.loads(one) for one in arguments] == [{"a": 1}]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_a_form_may_quote_a_call(served: tuple[Inside, Script], stream: bool) -> None:
    running, script = served
    text = json.dumps({"quoted": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"})
    vars(script).update(vars(Script(text, pieces=3)))
    body = CHAT | {"response_format": {"type": "json_object"}, "stream": stream}
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for one in events for choice in one["choices"]]
        assert not any(delta.get("tool_calls") for delta in deltas)
        assert "".join(delta.get("content") or "" for delta in deltas) == text
    else:
        [choice] = answer.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Hm.<tool_call>", []),
        ('Hm.<tool_call>\n{"na', []),
        ('Hm.<tool_call>\n{"name": "add", "argu', ["add"]),
        ('Hm.<tool_call>\n{"name": "add", "arguments": {"a', ["add"]),
        ("Hm.<tool_call>\n<function=add>\n<param", ["add"]),
    ],
)
def test_a_call_that_is_cut_leaves_no_notation(served: tuple[Inside, Script], text: str, names: list[str]) -> None:
    running, script = served
    response = {"model": "model", "input": "Hi", "tools": [{"type": "function", **FUNCTION}]}
    with running.client() as client:

        def posted(path: str, body: dict[str, Any]) -> str:
            vars(script).update(vars(Script(text, "length", pieces=2)))
            return client.post(path, json=body).text

        [choice] = json.loads(posted("/v1/chat/completions", CHAT))["choices"]
        message = json.loads(posted("/v1/messages", MESSAGE))
        output = json.loads(posted("/v1/responses", response))
        streams = [
            posted("/v1/chat/completions", CHAT | {"stream": True}),
            posted("/v1/messages", MESSAGE | {"stream": True}),
            posted("/v1/responses", response | {"stream": True}),
        ]
    assert choice["message"]["content"] == "Hm."
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls") or []] == names
    assert choice["finish_reason"] == "length"
    assert message["stop_reason"] == "max_tokens"
    assert [block.get("text", block.get("name")) for block in message["content"]] == ["Hm.", *names]
    assert [block["input"] for block in message["content"][1:]] == [{}] * len(names)
    assert output["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in output["output"]] == ["message", *["function_call"] * len(names)]
    assert output["output"][0]["content"][0]["text"] == "Hm."
    for stream, begins in zip(streams, ('"tool_calls":[{', '"tool_use"', '"function_call"'), strict=True):
        assert "tool_call>" not in stream
        assert "<function" not in stream
        assert (begins in stream.replace(" ", "")) == bool(names)
