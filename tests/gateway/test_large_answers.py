"""Answers that are much work: read in parts, and written beside the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inflight.gateway import __main__ as process
from inflight.gateway import log_probs, scores, tokenize
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.generation import Job, run
from inflight.gateway.responses import endpoint
from inflight.text.output.format import ChatFormat
from tests.gateway.support.answers import CHAT, MODEL
from tests.gateway.support.gateways import Inside, inside

TOKENS, LIKELIEST = 1500, 3


class Long:
    """An engine that sends a long answer as one response; or the log-probs of labels."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        count = len(request.log_prob_token_ids)
        outputs = {"token_log_probs": np.full((1, count), -1.0, np.float32)} if count else {}
        tokens = [5] if count else list(range(5, 105)) * (TOKENS // 100)
        values = [-1.0] * len(tokens) if request.log_probs else []
        top = [[(5, -1.0)] * LIKELIEST] * len(tokens) if request.top_log_probs else []
        yield EngineDelta(0, tokens, None, "length", values, top, len(tokens), 0, outputs)

    async def close(self) -> None:
        """Close nothing."""


@pytest.fixture(scope="module")
def running() -> Iterator[Inside]:
    with inside(ready=True) as served:
        app: Any = served.server.config.app
        engine: Any = Long()
        app.state.gateway = replace(served.gateway, engine=engine)
        yield served


def noted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> set[bool]:
    """Return where a function of a module is called from now on: whether beside the event loop."""
    beside: set[bool] = set()
    function: Callable[..., Any] = getattr(module, name)

    def note(*arguments: Any, **more: Any) -> Any:
        beside.add(threading.current_thread().name.startswith("prepare"))
        return function(*arguments, **more)

    monkeypatch.setattr(module, name, note)
    return beside


def test_others_have_their_turn_while_a_long_response_of_the_engine_is_read(running: Inside) -> None:
    app: Any = running.server.config.app
    turns: list[int] = []

    async def read() -> list[int]:
        request = GenerateRequest(prompt=[5], max_tokens=TOKENS, log_probs=True, top_log_probs=LIKELIEST)
        job = Job(request, ChatFormat(running.gateway.tokenizer))
        parts: list[int] = []
        async for delta in run(app.state.gateway, job):
            assert len(delta.log_probs) == len(delta.token_ids)
            assert (delta.finish_reason is not None) == (sum(parts) + len(delta.token_ids) == TOKENS)
            parts.append(len(delta.token_ids))
            turns.append(0)
        return parts

    async def count() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def both() -> list[int]:
        other = asyncio.create_task(count())
        parts = await read()
        other.cancel()
        return parts

    parts = asyncio.run(both())
    assert sum(parts) == TOKENS
    assert max(parts) * (1 + LIKELIEST) <= 512
    places = [place for place, who in enumerate(turns) if who == 0]
    assert all(1 in turns[first:last] for first, last in pairwise(places))


@pytest.mark.proof
@pytest.mark.parametrize("streams", [False, True])
def test_log_probs_of_a_response_are_written_beside_the_event_loop(
    running: Inside, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    beside = noted(monkeypatch, endpoint, "written")
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": LIKELIEST, "stream": streams}
    with running.client() as client:
        reply = client.post("/v1/responses", json={"model": MODEL, "input": "a", **asked})
    last = reply.text.strip().rpartition("\ndata: ")[2] if streams else reply.text
    response = json.loads(last)["response"] if streams else json.loads(last)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == TOKENS
    assert {len(entry["top_logprobs"]) for entry in entries} == {LIKELIEST}
    # The first events are small, and the last ones are not.
    assert beside == ({False, True} if streams else {True})


def test_log_probs_of_a_whole_chat_are_written_beside_the_event_loop(
    running: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = noted(monkeypatch, log_probs, "chat_entry")
    body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": LIKELIEST}
    with running.client() as client:
        reply = client.post(CHAT, json={"model": MODEL, **body})
    assert len(reply.json()["choices"][0]["logprobs"]["content"]) == TOKENS
    assert beside == {True}


@pytest.mark.parametrize("path", ["/v1/score", "/generative_scoring"])
@pytest.mark.parametrize("items", [1, 128])
def test_scores_of_many_labels_are_made_beside_the_event_loop(
    running: Inside, monkeypatch: pytest.MonkeyPatch, path: str, items: int
) -> None:
    beside = noted(monkeypatch, scores, "_probabilities")
    body = {"query": "a", "items": ["b"] * items, "label_token_ids": list(range(5, 133)), "apply_softmax": True}
    with running.client() as client:
        reply = client.post(path, json={"model": MODEL, **body})
    found = reply.json()["scores"] if path == "/v1/score" else [[one["score"]] for one in reply.json()["data"]]
    assert found == [[1 / 128] * len(found[0])] * items
    assert beside == {items == 128}


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_long_text_of_tokens_is_written_beside_the_event_loop(
    running: Inside, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    beside = noted(monkeypatch, tokenize, "written")
    with running.client() as client:
        reply = client.post("/detokenize", json={"tokens": [105] * count})
        [one] = client.post("/detokenize", json={"tokens": [105]}).json().values()
    assert reply.json() == {"prompt": one * count}
    assert beside == {False, count > 1}


def test_the_collector_leaves_alone_what_lives_as_long_as_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    server = SimpleNamespace(run=lambda: frozen.append(gc.get_freeze_count()), started=True)
    monkeypatch.setattr(process, "make_server", lambda deployment, kept: server)
    monkeypatch.setattr(process, "load_deployment", lambda path: SimpleNamespace(observability=None))
    monkeypatch.setattr(process, "logs", SimpleNamespace(configure=lambda settings: None))
    monkeypatch.setattr(process, "with_sections", lambda deployment, sections: deployment)
    before = gc.get_freeze_count()
    try:
        assert process.main(["here"]) == 0
        assert frozen[0] > before + 1000
    finally:
        gc.unfreeze()
