"""The event loop around TensorRT-LLM, and the watchdog, alone."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.errors import EngineFailure, InvalidRequest
from inflight.trtllm.runtime import Runtime, read_response
from inflight.trtllm.watchdog import Watchdog


class Refusal(RuntimeError):
    """Stands for the API's ``RequestError``."""


class Api:
    """An ``LLM`` that counts, and answers with what it is given."""

    def __init__(self) -> None:
        self.reads = 0
        self.answer: Any = Refusal("prompt too long")
        self.threads: set[str] = set()

    def generate_async(self, **_: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def get_stats_async(self, timeout: float) -> AsyncIterator[Any]:
        self.reads += 1
        return self._none()

    async def _none(self) -> AsyncIterator[Any]:
        for nothing in ():
            yield nothing

    def shutdown(self) -> None:
        self.threads.clear()


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def runtime(api: Api) -> Iterator[Runtime]:
    made = Runtime(api, Refusal)
    yield made
    made.close()


def _response(tokens: list[int], **more: Any) -> Any:
    output = {"token_ids": tokens, "logprobs": [], "generation_logits": None, "finish_reason": None}
    one = SimpleNamespace(**output | {"request_perf_metrics": None} | more)
    return SimpleNamespace(outputs=[one], context_logits=None, finished=one.finish_reason is not None, cached_tokens=3)


def test_errors_are_the_requests_or_ours(api: Api, runtime: Runtime) -> None:
    for error, expected in ((Refusal("too long"), InvalidRequest), (RuntimeError("CUDA"), EngineFailure)):
        api.answer = error
        runtime.generate(7, dict)
        [event] = runtime.take(2)
        assert event.key == 7
        assert isinstance(event.error, expected)
    assert api.threads == {"tensorrt-llm"}


def test_statistics_are_asked_for_at_a_pace(api: Api, runtime: Runtime) -> None:
    time.sleep(0.5)
    assert 1 <= api.reads <= 8
    assert runtime.iteration == {}


def test_an_abort_of_what_is_not_there_does_nothing(api: Api, runtime: Runtime) -> None:
    runtime.abort(99)
    runtime.generate(1, dict)
    [event] = runtime.take(2)
    assert event.key == 1


def test_only_what_is_new_is_read() -> None:
    log_prob = SimpleNamespace(logprob=-0.5)
    response = _response([4, 5, 6], logprobs=[{4: log_prob}, {5: log_prob}, {6: log_prob}], finish_reason="length")
    event = read_response(1, response, seen=2)
    assert (event.tokens, event.log_probs, event.finish_reason, event.cached_tokens) == ([6], [{6: -0.5}], "length", 3)
    # A matched stop token is cut off the tokens that came before.
    assert read_response(1, _response([4], finish_reason="stop"), seen=2).tokens == []


def test_logits_must_fit_the_tokens() -> None:
    rows = torch.arange(12.0, dtype=torch.bfloat16).reshape(3, 4)
    event = read_response(1, _response([4, 5, 6], generation_logits=rows), seen=2)
    assert event.generation_logits is not None
    assert event.generation_logits.tolist() == [[8.0, 9.0, 10.0, 11.0]]
    with pytest.raises(RuntimeError, match="3 new tokens came with 1 rows of logits"):
        read_response(1, _response([4, 5, 6], generation_logits=rows[:1]), seen=0)


def test_the_watchdog_bites_once_and_only_without_progress() -> None:
    now, called = [0.0], threading.Event()
    watchdog = Watchdog(10, called.set, lambda: now[0])
    for now[0] in (9.0, 10.0):
        assert not watchdog.bites()
    watchdog.progress()
    now[0] = 20.0
    assert not watchdog.bites()
    now[0] = 20.5
    assert watchdog.bites()
    assert watchdog.hung
    assert not watchdog.bites()
    assert called.wait(3)
