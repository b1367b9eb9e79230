"""Answers of /v1/responses and /v1/messages over HTTP: reasoning, calls and text in every form, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.errors import DeadlineExceeded, EngineFailure, InvalidRequest, QueueFull
from tests.gateway.support.gateways import Inside, until
from tests.gateway.support.scripted import Script, scripted
from tests.gateway.test_messages_events import replay as replay_message
from tests.gateway.test_responses_events import replay as replay_items
from tests.gateway.test_responses_events import without_ids
from tests.support.tables import each_row

Json = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSE: Json = {
    "model": "model",
    "input": "Hi",
    "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
}
MESSAGE: Json = {
    "model": "model",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": "add", "input_schema": PARAMETERS}],
}
MESSAGE_PROMPT = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nWhat is it?\n</think>\n\n"
TEXTS = [
    "",
    "Yes.",
    "Grüße, 世界 👋!",
    CALL,
    f"Let me see.\n{CALL}\n{CALL}",
    f"{THOUGHT}Yes, it is.",
    f"{THOUGHT}{CALL}",
    f"{THOUGHT}Let me see.\n{CALL}",
    f"{CALL}Done.",
    f'Let me see.\n{CALL}\nname "a": 1 name',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b',
    "<think>\nI never",
]
scripts = st.builds(
    Script,
    text=st.sampled_from(TEXTS),
    finish_reason=st.sampled_from(("stop", "length")),
    pieces=st.integers(0, 1000),
    cached=st.integers(0, 5),
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Inside, Script]]:
    with scripted(model_name="model") as running:
        yield running


def follow(script: Script, given: Script) -> None:
    vars(script).update(vars(given))


def post(running: Inside, path: str, body: Json, **headers: str) -> httpx.Response:
    with running.client() as client:
        headers = {"content-type": "application/json", **headers}
        return client.post(path, content=json.dumps(body), headers=headers)


def events_of(answer: httpx.Response) -> list[Json]:
    """Return the events of a stream, whose names are their types."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.proof
@given(script=scripts, log_probs=st.booleans(), seals=st.booleans())
def test_a_streamed_response_is_the_whole_one(
    served: tuple[Inside, Script], script: Script, log_probs: bool, seals: bool
) -> None:
    running, current = served
    follow(current, script)
    include = ["message.output_text.logprobs"] * log_probs + ["reasoning.encrypted_content"] * seals
    body = RESPONSE | {"include": include, "top_logprobs": 1 if log_probs else 0}
    whole = post(running, "/v1/responses", body).json()
    events = events_of(post(running, "/v1/responses", body | {"stream": True}))
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    assert replay_items(events) == [
        {name: value for name, value in item.items() if name != "encrypted_content"} | _without_log_probs(item)
        for item in last["output"]
    ]
    assert last["status"] == ("incomplete" if script.finish_reason == "length" else "completed")
    if log_probs:
        check_log_probs(running, script, [item["content"][0] for item in last["output"] if item["type"] == "message"])


def check_log_probs(running: Inside, script: Script, parts: list[Json]) -> None:
    """Check that the entries of each text are those of its tokens: a token's log-prob is minus its place."""
    [tokens] = running.gateway.tokenizer.encode_batch([script.text], add_special_tokens=False)
    for part in parts:
        entries = part["logprobs"]
        spelt = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
        assert spelt.rstrip() == part["text"].rstrip()  # space before a call is no text, but may be of its last token
        places = [-int(entry["logprob"]) for entry in entries]
        assert places == list(range(places[0], places[0] + len(places))) if places else part["text"] == ""
        before = running.gateway.tokenizer.decode(tokens[: places[0]]) if places else ""
        assert script.text[len(before.rstrip()) :].lstrip().startswith(part["text"].lstrip())


def _without_log_probs(item: Json) -> Json:
    """Return the content of an item as its deltas add up to: log-probs come beside them."""
    if item["type"] != "message":
        return {}
    return {"content": [part | {"logprobs": []} for part in item["content"]]}


@pytest.mark.proof
@given(script=scripts, omits=st.booleans())
def test_a_streamed_message_is_the_whole_one(served: tuple[Inside, Script], script: Script, omits: bool) -> None:
    running, current = served
    follow(current, script)
    body = MESSAGE | {"thinking": {"type": "adaptive", "display": "omitted" if omits else "summarized"}}
    whole = post(running, "/v1/messages", body).json()
    events = events_of(post(running, "/v1/messages", body | {"stream": True}))
    message = replay_message(events)
    blocks = [[block | {"id": ""} for block in one["content"]] for one in (whole, message)]
    assert blocks[0] == blocks[1]
    for name in ("role", "type", "model", "stop_reason", "stop_sequence", "usage"):
        assert whole[name] == message[name]


def test_reasoning_text_and_calls_of_a_response(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script(f"{THOUGHT}Let me see.\n{CALL}\n{CALL}", cached=2))
    response = post(running, "/v1/responses", RESPONSE | {"include": ["message.output_text.logprobs"]}).json()
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "What is it?"}]
    part = message["content"][0]
    assert part["text"].strip() == "Let me see."
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode().strip() == "Let me see."
    assert [(one["name"], one["arguments"]) for one in (first, second)] == [("add", '{"a": 1}')] * 2
    usage = response["usage"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2


def test_reasoning_text_and_calls_of_a_message(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script(f"{THOUGHT}Let me see.\n{CALL}"))
    message = post(running, "/v1/messages", MESSAGE).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][2]["input"] == {"a": 1}
    assert message["stop_reason"] == "tool_use"
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


def test_a_conversation_goes_on_with_what_was_answered(served: tuple[Inside, Script]) -> None:
    """Clients send our own items and blocks back; their ids match and nothing in them is refused."""
    running, script = served
    follow(script, Script(f"{THOUGHT}Let me see.\n{CALL}"))
    output = post(running, "/v1/responses", RESPONSE | {"include": ["reasoning.encrypted_content"]}).json()["output"]
    call_id = output[2]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "3"}
    turn = RESPONSE | {"input": [{"role": "user", "content": "Hi"}, *output, result]}
    answer = post(running, "/v1/responses", turn)
    assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False)
    content = post(running, "/v1/messages", MESSAGE).json()["content"]
    block = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": "3"}
    messages = [*MESSAGE["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": [block]}]
    answer = post(running, "/v1/messages", MESSAGE | {"messages": messages})
    assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False)


@pytest.mark.proof
@each_row("text", TEXTS)
def test_a_conversation_goes_on_whatever_was_answered(served: tuple[Inside, Script], text: str) -> None:
    """Reasoning alone, an empty answer, a call that was cut."""
    running, script = served
    for reason in ("stop", "length"):
        follow(script, Script(text, reason))
        output = post(running, "/v1/responses", RESPONSE).json()["output"]
        answer = post(running, "/v1/responses", RESPONSE | {"input": [{"role": "user", "content": "Hi"}, *output]})
        assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False), answer.text
        content = post(running, "/v1/messages", MESSAGE).json()["content"]
        messages = [*MESSAGE["messages"], {"role": "assistant", "content": content}, *MESSAGE["messages"]]
        answer = post(running, "/v1/messages", MESSAGE | {"messages": messages})
        assert (answer.status_code, "x-ignored-fields" in answer.headers) == (200, False), answer.text


def test_half_a_character_in_arguments_stays_an_escape(served: tuple[Inside, Script]) -> None:
    """Models can write one, and templates make text of arguments."""
    running, script = served
    follow(script, Script("Yes."))
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": "\\ud800"}'}
    answer = post(running, "/v1/responses", RESPONSE | {"input": [{"role": "user", "content": "Hi"}, call]})
    assert answer.status_code == 200
    assert '{"a": "\\ud800"}' in prompt_of(running, script)


def prompt_of(running: Inside, script: Script) -> str:
    assert script.request is not None
    return running.gateway.tokenizer.decode(list(script.request.prompt), skip_special_tokens=False)


def test_the_prompt_has_the_whole_conversation(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script("Yes."))
    call = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
    items = [{"role": "user", "content": "Hi"}, thought, call, output]
    assert post(running, "/v1/responses", RESPONSE | {"input": items, "instructions": "Be brief."}).status_code == 200
    rest = (
        '<|system|>Be brief.<|user|>Hi<|assistant|><think>Hm.</think><tool_call>{"name": "add", "arguments": '
        '{"a": 1}}</tool_call><|tool|>3<|assistant|>'
    )
    assert prompt_of(running, script).endswith(rest)
    assert prompt_of(running, script).startswith('<tools>{"type": "function", "function": {"name": "add"')
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}},
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "3"}]},
    ]
    assert post(running, "/v1/messages", MESSAGE | {"messages": messages, "system": "Be brief."}).status_code == 200
    assert prompt_of(running, script).endswith(rest)
    counted = post(running, "/v1/messages/count_tokens", MESSAGE_PROMPT | {"messages": messages, "system": "Be brief."})
    assert script.request is not None
    assert counted.json() == {"input_tokens": len(script.request.prompt)}


@each_row("thinking, end", [({"type": "disabled"}, "<think></think>"), ({"type": "adaptive"}, "<|assistant|>")])
def test_thinking_is_switched_in_the_template(served: tuple[Inside, Script], thinking: Json, end: str) -> None:
    running, script = served
    follow(script, Script("Yes."))
    assert post(running, "/v1/messages", MESSAGE | {"thinking": thinking}).status_code == 200
    assert prompt_of(running, script).endswith(end)


@each_row("thinking, value", [("disabled", True), ("adaptive", False), ("enabled", False)])
def test_thinking_is_switched_once(served: tuple[Inside, Script], thinking: str, value: bool) -> None:
    running, script = served
    follow(script, Script("Yes."))
    options = {"thinking": {"type": thinking}, "chat_template_kwargs": {"enable_thinking": value}}
    for path, body in (("/v1/messages", MESSAGE), ("/v1/messages/count_tokens", MESSAGE_PROMPT)):
        answer = post(running, path, body | options)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "chat_template_kwargs.enable_thinking")
        options["chat_template_kwargs"] = {"enable_thinking": not value}
        assert post(running, path, body | options).status_code == 200
        options["chat_template_kwargs"] = {"enable_thinking": value}


def test_what_is_asked_for_reaches_the_engine(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script("Yes."))
    post(running, "/v1/responses", RESPONSE | {"temperature": 0.5, "top_p": 0.9, "max_output_tokens": 9, "seed": 3})
    request = script.request
    assert request is not None
    assert (request.temperature, request.top_p, request.max_tokens, request.seed) == (0.5, 0.9, 9, 3)
    off = {"thinking": {"type": "disabled"}}  # a model that may think has its stop strings looked for in the gateway
    post(running, "/v1/messages", MESSAGE | {"temperature": 0, "top_k": 5, "stop_sequences": ["x"]} | off)
    request = script.request
    assert request is not None
    assert (request.temperature, request.top_k, request.max_tokens, list(request.stop_strings)) == (0, 5, 500, ["x"])


def test_a_message_takes_the_room_that_there_is(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script("Yes.", "length"))
    message = post(running, "/v1/messages", MESSAGE | {"max_tokens": 100_000}).json()
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert script.request is not None
    assert script.request.max_tokens + len(script.request.prompt) == running.gateway.max_model_len
    assert post(running, "/v1/messages", MESSAGE).json()["stop_reason"] == "max_tokens"


FAILURES = [
    (InvalidRequest("temperature is 5"), 400, 400, "invalid_request_error"),
    (QueueFull("the queue is full"), 503, 529, "overloaded_error"),
    (DeadlineExceeded("too late"), 504, 504, "timeout_error"),
    (EngineFailure("it broke"), 500, 500, "api_error"),
]


@each_row("error, status, message_status, kind", FAILURES)
def test_an_error_before_the_first_token_has_a_status(
    served: tuple[Inside, Script], error: Any, status: int, message_status: int, kind: str
) -> None:
    running, script = served
    follow(script, Script("Yes", error=error))
    for stream in (False, True):
        answer = post(running, "/v1/responses", RESPONSE | {"stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
        answer = post(running, "/v1/messages", MESSAGE | {"stream": stream})
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (message_status, "error", kind)
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


def test_an_error_in_a_stream_is_an_event(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script("Yes, it is a long answer, with many tokens.", pieces=1, error=EngineFailure("it broke")))
    events = events_of(post(running, "/v1/responses", RESPONSE | {"stream": True}))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert "Traceback" not in json.dumps(events)
    events = events_of(post(running, "/v1/messages", MESSAGE | {"stream": True}))
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"


def test_a_client_that_leaves_ends_the_answer(served: tuple[Inside, Script]) -> None:
    running, script = served
    for path, body in (("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)):
        follow(script, Script("a " * 200_000, pieces=1))
        before = script.closed
        with running.client() as client, client.stream("POST", path, json=body | {"stream": True}) as answer:
            next(answer.iter_bytes())
        until(lambda before=before: script.closed > before)


def test_ignored_fields_are_named(served: tuple[Inside, Script]) -> None:
    running, script = served
    follow(script, Script("Yes."))
    answer = post(
        running, "/v1/responses", RESPONSE | {"colour": 1, "input": [{"role": "user", "content": "Hi", "x": 1}]}
    )
    assert answer.headers["x-ignored-fields"] == "colour, input[0].x"
    thinking = {"type": "enabled", "budget_tokens": 2000}
    answer = post(running, "/v1/messages", MESSAGE | {"thinking": thinking})
    assert answer.headers["x-ignored-fields"] == "thinking.budget_tokens"


def test_errors_below_messages_have_anthropics_shape(served: tuple[Inside, Script]) -> None:
    running, _ = served
    with running.client() as client:
        answers = [
            (client.get("/v1/messages"), 405, "invalid_request_error"),
            (client.get("/v1/messages/nothing"), 404, "not_found_error"),
            (client.post("/v1/messages", json=MESSAGE | {"model": "none"}), 404, "not_found_error"),
            (client.post("/v1/messages", content=b"{"), 415, "invalid_request_error"),
            (client.post("/v1/messages", json=[]), 400, "invalid_request_error"),
            (client.post("/v1/messages/count_tokens", json={"model": "model"}), 400, "invalid_request_error"),
            (client.post("/v1/messages", json=MESSAGE | {"system": "a" * (17 << 20)}), 413, "request_too_large"),
        ]
        for answer, status, kind in answers:
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
        assert "error" in client.get("/v1/messagesque").json()
        assert "type" not in client.get("/v1/messagesque").json()


ALLOWED: Json = {
    "tools": [*RESPONSE["tools"], {"type": "function", "name": "a b"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a b"}]},
}
FORM: Json = {"format": {"type": "json_schema", "name": "x", "schema": {}}}


def test_errors_of_the_chat_name_the_requests_own_fields(served: tuple[Inside, Script]) -> None:
    running, _ = served
    bad = {"name": "a b", "parameters": PARAMETERS}
    for path, body, param in (
        ("/v1/responses", RESPONSE | {"tools": [{"type": "function", **bad}]}, "tools[0].name"),
        ("/v1/responses", RESPONSE | {"max_output_tokens": 100_000}, "input"),
        ("/v1/responses", RESPONSE | {"reasoning": {"effort": 5}}, "reasoning.effort"),
        ("/v1/responses", RESPONSE | ALLOWED, "tools[1].name"),
        ("/v1/responses", RESPONSE | {"guided_json": {}, "text": FORM}, "guided_json"),
        ("/v1/messages", MESSAGE | {"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ("/v1/messages", MESSAGE | {"output_config": {"effort": "x" * 65}}, "output_config.effort"),
        ("/v1/messages", MESSAGE | {"stop_sequences": [str(number) for number in range(500)]}, "stop_sequences"),
    ):
        error = post(running, path, body).json()["error"]
        assert error["param"] == param
        assert param in error["message"]
        assert not [word for word in ("function", "response_format") if word in error["message"]]
