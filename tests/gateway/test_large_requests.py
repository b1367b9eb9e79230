"""Requests that are much work: counted before anything is built, prepared beside the event loop, shared where equal."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from inflight.gateway import body as body_module
from inflight.gateway import guides as guides_module
from inflight.gateway import preparing
from inflight.gateway.body import MOST_OF
from inflight.gateway.completion_choice import CompletionChoice
from inflight.gateway.context import Gateway
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import invalid
from inflight.gateway.workers import HUGE
from inflight.gateway.workers import LARGE as LARGE_BYTES
from inflight.text import template_budget
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.answers import COMPLETIONS, MODEL, chunks, refusal
from tests.gateway.support.gateways import Inside, inside, until
from tests.gateway.support.scripted import scripted

LARGE = "a " * LARGE_BYTES
MANY = ["a"] * 99_999
FAR_TOO_LONG = "a b " * 500_000
PATIENCE_S = 60


class Recorder:
    """An engine that keeps what it is asked, and answers with one token and log-probs of the prompt."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        self.requests.append(request)
        log_probs = np.full((1, len(request.prompt) - 1), -1.0, np.float32)
        outputs = {"prompt_log_probs": log_probs} if request.prompt_log_probs is not None else {}
        yield EngineDelta(0, [5], None, "length", [-1.0] if request.log_probs else [], [], 1, 0, outputs)

    async def close(self) -> None:
        """Close nothing."""


@contextmanager
def recorded() -> Iterator[tuple[Inside, Recorder]]:
    """Serve the demo with an engine that keeps what it is asked."""
    recorder = Recorder()
    with inside(ready=True) as running:
        app: Any = running.server.config.app
        engine: Any = recorder
        app.state.gateway = replace(running.gateway, engine=engine)
        yield running, recorder


@pytest.fixture(scope="module")
def ready() -> Iterator[Inside]:
    """A gateway that lets through what needs the engine, which is away."""
    with inside(ready=True) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/rerank", {"query": LARGE, "documents": ["b"] * 1000}, "documents", "with the query"),
        (
            "/v1/rerank",
            {"query": "a", "instruction": LARGE, "documents": ["b"] * 1000},
            "documents",
            "the instruction for each",
        ),
        ("/v1/score", {"text_1": LARGE, "text_2": ["b"] * 1000}, "text_2", "with the query"),
        ("/v1/score", {"query": LARGE, "items": ["b"] * 1000, "label_token_ids": [5]}, "items", "32769000 characters"),
        ("/v1/score", {"query": [5] * 9999, "items": [[5]] * 1000, "label_token_ids": [5]}, "items", "10000000 token"),
        (
            "/generative_scoring",
            {"query": LARGE, "items": ["b"] * 1000, "label_token_ids": [5]},
            "items",
            "32769000 characters",
        ),
    ],
)
def test_what_is_said_once_and_read_with_each_is_counted_with_each(
    ready: Inside, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    with ready.client() as client:
        error = refusal(client, path, **body)
    assert error["param"] == param
    assert said in error["message"]
    assert "the limit is 4194304" in error["message"]


@pytest.mark.parametrize("mark", MOST_OF)
def test_a_body_has_so_many_values_at_most(ready: Inside, mark: str) -> None:
    most = MOST_OF[mark]
    with ready.client() as client:
        others = json.dumps({"prompt": "a", "x": ""}).count(mark)
        body = json.dumps({"prompt": "a", "x": mark * (most - others)})
        headers = {"content-type": "application/json"}
        assert client.post("/tokenize", content=body, headers=headers).status_code == 200
        refused = client.post("/tokenize", content=body.replace(mark, mark * 2, 1), headers=headers)
    assert refused.status_code == 400
    assert repr(mark) in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": FAR_TOO_LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", FAR_TOO_LONG]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": FAR_TOO_LONG}]}, "messages"),
        ("/v1/embeddings", {"input": FAR_TOO_LONG}, "input"),
        ("/v1/rerank", {"query": "a", "documents": ["b", FAR_TOO_LONG]}, "documents[1]"),
        ("/v1/score", {"text_1": "a", "text_2": FAR_TOO_LONG}, "text_2"),
        ("/v1/score", {"query": "a", "items": [FAR_TOO_LONG], "label_token_ids": [5]}, "items"),
        ("/v1/responses", {"input": FAR_TOO_LONG}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": FAR_TOO_LONG}], "max_tokens": 1}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(
    ready: Inside, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str | None
) -> None:
    encoded = 0
    encode = Tokenizer.encode_batch

    def counted(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        nonlocal encoded
        encoded += sum(map(len, texts))
        return encode(tokenizer, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    with ready.client() as client:
        reply = client.post(path, json={"model": MODEL, **body})
    error = reply.json()["error"]
    assert (reply.status_code, error.get("param")) == (400, param)
    assert "maximum context length is 2048 tokens. However, you requested more than 40" in error["message"]
    assert encoded < 100_000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": '{"enum":[' + "1," * 400_000 + "1]}"}, "guided_json"),
        ({"guided_json": {"enum": [1] * 100_000}}, "guided_json"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        ({"guided_choice": ["a" * 30] * 4000}, "guided_choice"),
        ({"structured_outputs": {"json": "[" * 70_000}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"enum": MANY}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "structural_tag", "structures": ["a"] * 99_999}}, "response_format"),
        ({"messages": [{"role": "user", "content": "a" * (5 << 20)}]}, "messages"),
        ({"chat_template_kwargs": {"enable_thinking": "a" * (5 << 20)}}, "chat_template_kwargs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_too_large_is_neither_read_nor_written(
    ready: Inside, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    monkeypatch.setattr(guides_module, "json", None)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], **fields}
    content = json.JSONEncoder().encode(body)
    with ready.client(headers={"content-type": "application/json"}) as client:
        reply = client.post("/v1/chat/completions", content=content)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert " or more; the limit is " in reply.json()["error"]["message"]


def test_what_is_cut_off_or_only_counted_may_be_longer(ready: Inside) -> None:
    long = "a b " * 20_000
    with ready.client() as client:
        assert client.post("/tokenize", json={"prompt": long}).json()["count"] > 20_000
        body = {"model": MODEL, "prompt": long, "truncate_prompt_tokens": 8, "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code != 400


def test_others_are_answered_while_a_large_request_is_prepared(ready: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the body is read, another client asks; were it read by the event loop's thread, neither would end."""
    parse, reading, answered = body_module.parse_object, threading.Event(), threading.Event()

    def parse_late(body: bytes) -> dict[str, Any]:
        reading.set()
        assert answered.wait(PATIENCE_S)
        return parse(body)

    monkeypatch.setattr(preparing, "parse_object", parse_late)
    replies: list[httpx.Response] = []
    with ready.client() as client, ready.client() as other:
        ask = threading.Thread(target=lambda: replies.append(client.post("/tokenize", json={"prompt": LARGE})))
        ask.start()
        assert reading.wait(PATIENCE_S)
        assert other.get("/v1/models").status_code == 200
        answered.set()
        ask.join()
    assert [reply.status_code for reply in replies] == [200]


def test_what_a_refused_request_has_held_is_let_go_at_once(ready: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the garbage collector next looks for circles: the error has passed frames that refer to it."""

    class Held:
        """Something that takes memory."""

    def refuse(body: bytes) -> dict[str, Any]:
        held = Held()
        alive.append(weakref.ref(held))
        raise invalid("it is refused")

    alive: list[weakref.ref[Held]] = []
    monkeypatch.setattr(preparing, "parse_object", refuse)
    gc.disable()
    try:
        with ready.client() as client:
            assert refusal(client, "/tokenize", prompt=LARGE)["message"] == "it is refused"
        until(lambda: alive[0]() is None)
    finally:
        gc.enable()


class Forks:
    """Makes the calls of another process in this one, and keeps which."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.calls: list[Any] = []

    def call(self, function: Any, *arguments: Any) -> Any:
        self.calls.append(function)
        return SimpleNamespace(result=lambda: function(self._gateway, *arguments), end=lambda: None)


@contextmanager
def forking() -> Iterator[tuple[Inside, Forks]]:
    """Serve the demo, with what stands for other processes."""
    with inside() as running:
        app, forks = running.server.config.app, Forks(running.gateway)
        app.state.gateway = replace(running.gateway, fork_server=forks)  # type: ignore[union-attr,arg-type]
        yield running, forks


@pytest.mark.parametrize(("body", "apart"), [({"tokens": [5] * 40_000}, 0), ({"tokens": [5], "x": "a" * HUGE}, 1)])
def test_what_is_large_by_its_bytes_is_prepared_in_another_process(body: dict[str, Any], apart: int) -> None:
    """Only this: a body of many values and few bytes is read in milliseconds, and processes run one at a time."""
    with forking() as (running, forks), running.client() as client:
        assert client.post("/detokenize", json=body).status_code == 200
    assert len(forks.calls) == apart


@pytest.mark.parametrize("padding", [0, LARGE_BYTES, HUGE])
def test_a_chat_whose_template_takes_long_is_prepared_in_another_process(
    monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    """However large it is: a thread that renders would hold the others up."""
    monkeypatch.setattr(template_budget, "AT_ONCE_S", -1.0)
    with forking() as (running, forks), running.client() as client:
        body = {"messages": [{"role": "user", "content": "a"}], "padding": "a" * padding}
        assert client.post("/tokenize", json=body).status_code == 200
    assert len(forks.calls) == 1


def test_log_probs_of_a_long_prompt_are_written_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, take = [], CompletionChoice.take

    def noted(choice: CompletionChoice) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        return take(choice)

    monkeypatch.setattr(CompletionChoice, "take", noted)
    with recorded() as (running, _), running.client() as client:
        for size in (2000, 2):
            body = {"model": MODEL, "prompt": [5] * size, "echo": True, "logprobs": 0, "max_tokens": 1}
            reply = client.post(COMPLETIONS, json=body)
            scores = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
            assert scores == [None, *[-1.0] * size]
    assert threads[0].startswith("prepare")
    assert not threads[1].startswith("prepare")


def test_many_unknown_fields_are_counted_as_others() -> None:
    with inside(ready=True) as running, running.client() as client:
        body = {"prompt": "a", **{f"x{number}": 1 for number in range(5000)}}
        assert client.post("/tokenize", json=body).status_code == 200
        assert client.post("/tokenize", json={"prompt": "a", "x3": 1}).status_code == 200
        page = client.get("/metrics").text
    assert 'inflight_gateway_ignored_fields_total{field="x3"} 2.0' in page
    assert 'inflight_gateway_ignored_fields_total{field="other"} 4900.0' in page


def test_many_small_prompts_are_a_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, parse = [], preparing.__dict__["parse_object"]

    def noted(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread().name)
        parsed: dict[str, Any] = parse(body)
        return parsed

    monkeypatch.setattr(preparing, "parse_object", noted)
    with recorded() as (running, _), running.client() as client:
        for prompts in ([[5]] * 1000, [[5]]):
            body = {"model": MODEL, "prompt": prompts, "max_tokens": 1}
            assert len(json.dumps(body)) < LARGE_BYTES
            assert client.post(COMPLETIONS, json=body).status_code == 200
    assert [name.startswith("prepare") for name in threads] == [True, False]


def test_what_all_prompts_share_is_made_once() -> None:
    schema = {"type": "object"}
    with recorded() as (running, recorder), running.client() as client:
        body = {"model": MODEL, "prompt": [[5]] * 50, "max_tokens": 1, "logit_bias": {"6": 1}, "bad_words": ["a"]}
        assert client.post(COMPLETIONS, json={**body, "guided_json": schema, "stop": "b"}).status_code == 200
    assert len(recorder.requests) == 50
    for name in ("bias", "bad_words", "stop_strings", "guide"):
        assert len({id(getattr(request, name)) for request in recorder.requests}) == 1


def test_a_request_has_so_many_choices_at_most(ready: Inside) -> None:
    with ready.client() as client:
        error = refusal(client, COMPLETIONS, prompt=[[5]] * 600, n=2, max_tokens=1)
    assert error["param"] == "n"
    assert "1024" in error["message"]


def test_a_stream_has_the_ids_of_its_prompt_once() -> None:
    with scripted() as (running, script), running.client() as client:
        script.text, script.pieces = "One two three four five six seven.", 1
        parts = chunks(client, COMPLETIONS, prompt=[5, 6, 7], return_token_ids=True)
    choices = [part["choices"][0] for part in parts]
    assert len(choices) > 2
    assert [choice.get("prompt_token_ids") for choice in choices] == [[5, 6, 7]] + [None] * (len(choices) - 1)
    assert all(choice["token_ids"] for choice in choices)
