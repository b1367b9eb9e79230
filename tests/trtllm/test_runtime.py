"""The event loop around TensorRT-LLM, alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight.errors import EngineFailure, InvalidRequest
from inflight.trtllm import runtime as module
from inflight.trtllm.runtime import Runtime, read_response
from tests.support.waiting import wait_until


class Refusal(RuntimeError):
    """Stands for the API's ``RequestError``."""


class Stream:
    """A result: gives its responses, raises those that are exceptions, and with ``hold`` ends only when aborted."""

    def __init__(self, *responses: Any, hold: bool = False) -> None:
        self._responses = iter(responses)
        self._hold = hold
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        for response in self._responses:
            if isinstance(response, Exception):
                raise response
            return response
        while self._hold and not self.aborted:
            await asyncio.sleep(0.01)
        raise StopAsyncIteration


class Api:
    """An ``LLM`` that counts, and answers with what it is given."""

    def __init__(self) -> None:
        self.down = False
        """Whether it has shut down."""
        self._executor = SimpleNamespace(is_shutdown=lambda: self.down)
        self.reads = 0
        self.answer: Any = Refusal("prompt too long")
        self.threads: set[str] = set()
        self.end: Callable[[], object] = lambda: None

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
        self.end()


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def runtime(api: Api) -> Iterator[Runtime]:
    made = Runtime(api, Refusal)
    yield made
    made.close()


def _take(runtime: Runtime, count: int) -> list[Any]:
    """Return so many events at least, and those that come soon after them."""
    events: list[Any] = []
    while len(events) < count and (more := runtime.take(30)):
        events += more
    return events + runtime.take(0.2)


def _response(tokens: list[int], **more: Any) -> Any:
    output = {"token_ids": tokens, "logprobs": [], "generation_logits": None, "finish_reason": None}
    one = SimpleNamespace(**output | {"request_perf_metrics": None} | more)
    return SimpleNamespace(outputs=[one], context_logits=None, finished=one.finish_reason is not None, cached_tokens=3)


@pytest.mark.parametrize("late", [False, True], ids=["by the call", "in the stream"])
@pytest.mark.parametrize("error", [Refusal("too long"), ValueError("too long"), TypeError("too\nlong")])
def test_what_is_refused_is_told(api: Api, runtime: Runtime, error: Exception, late: bool) -> None:
    """TensorRT-LLM's processes judge a request long after it was handed over; only RequestErrors come from there."""
    api.answer = Stream(Refusal(str(error))) if late else error
    runtime.generate(7, dict)
    [event] = runtime.take(30)
    assert (event.key, event.fatal) == (7, False)
    assert isinstance(event.error, InvalidRequest)
    assert str(event.error) == f"TensorRT-LLM refuses the request: {' '.join(str(error).split())}"
    assert api.threads == {"tensorrt-llm"}
    assert wait_until(lambda: runtime.open == 0)


def _raise() -> dict[str, Any]:
    raise ValueError("CUDA in the arguments")


@pytest.mark.parametrize(
    ("answer", "arguments", "fatal"),
    [
        (lambda: Stream(), _raise, False),
        (lambda: KeyError("CUDA"), dict, False),
        (lambda: RuntimeError("LLM is shutting down, CUDA"), dict, True),
        (lambda: Stream(Refusal("CUDA error")), dict, False),
        (lambda: Stream(Refusal("[TensorRT-LLM] Assertion failed: CUDA")), dict, False),
        (lambda: Stream(AssertionError("CUDA")), dict, False),
        (lambda: Stream(ValueError("CUDA: cannot reshape")), dict, False),
        (lambda: Stream(RuntimeError("CUDA: the worker has died")), dict, True),
        (lambda: Stream(SimpleNamespace(outputs="CUDA")), dict, False),
    ],
    ids=["arguments", "start", "start of the dead", "a step", "C++", "assertion", "response", "death", "unread"],
)
def test_faults_are_logged_and_told_without_details(
    api: Api,
    runtime: Runtime,
    caplog: pytest.LogCaptureFixture,
    answer: Callable[[], Any],
    arguments: Callable[[], dict[str, Any]],
    fatal: bool,
) -> None:
    """An error is the engine's end only where TensorRT-LLM says that it has shut down."""
    api.answer, api.down = answer(), fatal
    runtime.generate(7, arguments)
    [event] = runtime.take(30)
    assert isinstance(event.error, EngineFailure)
    assert "CUDA" not in str(event.error)
    assert event.fatal is fatal
    assert wait_until(lambda: runtime.open == 0)
    assert caplog.records[0].exc_info
    assert "request 7 failed in TensorRT-LLM" in caplog.text


@pytest.mark.parametrize("error", [Refusal("invalid"), AssertionError()])
def test_after_the_first_token_nothing_is_a_refusal(api: Api, runtime: Runtime, error: Exception) -> None:
    stream = api.answer = Stream(_response([4]), error)
    runtime.generate(7, dict)
    events = _take(runtime, 2)
    assert isinstance(events[-1].error, EngineFailure)
    # What broke with an AssertionError is the reading; the generation goes on.
    assert wait_until(lambda: stream.aborted is isinstance(error, AssertionError))


def test_an_abort_without_an_answer_is_over_after_a_grace(
    api: Api, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ABORT_GRACE_S", 0.1)

    class Dropped(Stream):
        """One that TensorRT-LLM forgets when it is aborted."""

        async def __anext__(self) -> Any:
            await asyncio.Event().wait()

    api.answer = Dropped()
    runtime.generate(7, dict)
    runtime.generate(8, dict)
    assert runtime.take(0.3) == []
    runtime.abort(7)
    assert wait_until(lambda: runtime.open == 1), "the other was not aborted"
    assert runtime.take(0.2) == []


def test_what_cannot_be_read_is_aborted_and_open_until_its_end(api: Api, runtime: Runtime) -> None:
    stream = api.answer = Stream(SimpleNamespace(outputs=[]), hold=True)
    runtime.generate(7, dict)
    [event] = runtime.take(30)
    assert isinstance(event.error, EngineFailure)
    assert wait_until(lambda: stream.aborted)
    assert wait_until(lambda: runtime.open == 0)


def test_a_stream_that_ends_without_a_reason_has_failed(api: Api, runtime: Runtime) -> None:
    api.answer = Stream(_response([4]))
    runtime.generate(7, dict)
    events = _take(runtime, 2)
    assert [event.tokens for event in events] == [[4], []]
    assert isinstance(events[-1].error, EngineFailure)
    api.answer = Stream(_response([4], finish_reason="stop"))
    runtime.generate(8, dict)
    [event] = _take(runtime, 1)
    assert event.error is None


def test_statistics_are_asked_for_at_a_pace(api: Api, runtime: Runtime) -> None:
    began, before = time.monotonic(), api.reads
    assert wait_until(lambda: api.reads > before + 3)
    time.sleep(0.2)
    assert api.reads - before <= 5 + (time.monotonic() - began) / module._STATS_PAUSE_S
    assert runtime.iteration == {}


def test_an_abort_ends_its_own_generation_alone(api: Api, runtime: Runtime) -> None:
    streams = {}
    for key in (1, 2):
        streams[key] = api.answer = Stream(_response([4]), hold=True)
        runtime.generate(key, dict)
        assert runtime.take(30)
    runtime.abort(99)
    runtime.abort(1)
    assert wait_until(lambda: runtime.open == 1)
    assert [streams[key].aborted for key in (1, 2)] == [True, False]
    assert runtime.take(0.2) == [], "an end that was asked for is no failure"
    runtime.abort(2)
    assert wait_until(lambda: runtime.open == 0)


def test_an_engine_that_does_not_end_is_left(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.1)
    ended = threading.Event()
    api.end = ended.wait
    began = time.monotonic()
    Runtime(api, Refusal).close()
    assert time.monotonic() - began < 30
    assert "does not shut down" in caplog.text
    ended.set()


def test_a_shutdown_that_fails_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.end = _raise
    Runtime(api, Refusal).close()
    assert "could not be shut down" in caplog.text


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
    with pytest.raises(RuntimeError, match="1 new tokens came with 2 rows of logits"):
        read_response(1, _response([4, 5, 6], generation_logits=rows[:2]), seen=2)


@pytest.mark.parametrize(
    ("tokens", "seen", "finish_reason", "first"),
    [
        ([4, 5], 1, None, 0),  # the last step's
        ([4, 5, 6], 2, None, 2),  # of all steps
        ([4, 5], 0, "stop", 0),  # of two tokens, and of the end id, which is not among them
        ([4, 5], 2, "stop", 0),  # of the end id alone
    ],
)
def test_each_row_of_logits_is_its_tokens(tokens: list[int], seen: int, finish_reason: str | None, first: int) -> None:
    new = len(tokens) - seen
    rows = torch.arange(12.0).reshape(3, 4)
    given = rows[:1] if (seen, finish_reason) in ((1, None), (2, "stop")) else rows
    event = read_response(1, _response(tokens, generation_logits=given, finish_reason=finish_reason), seen)
    assert event.generation_logits is not None
    assert event.generation_logits.tolist() == rows[first : first + new].tolist()
