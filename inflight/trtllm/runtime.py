"""Runs TensorRT-LLM's asynchronous generations in one event loop and hands over what they bring as plain events.

The loop has a thread of its own, because the API gives results only to the event loop in which a request was made.
This module knows the API's objects; not sequences, stops or streams.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight.errors import EngineFailure, InflightError, InvalidRequest

log = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 0.5
_STATS_PAUSE_S = 0.1
"""Between two reads of the statistics: before its first request TensorRT-LLM answers at once, with none."""


@dataclass(slots=True)
class Event:
    """What one response of TensorRT-LLM brought for one sequence."""

    key: int
    tokens: list[int] = field(default_factory=list)
    """New since the last event."""
    log_probs: list[dict[int, float]] = field(default_factory=list)
    """Per new token, token id to log-prob: of the token, or of the likeliest."""
    generation_logits: np.ndarray | None = None
    """float32 [new tokens, vocab]."""
    context_logits: np.ndarray | None = None
    """float32 [prompt, vocab]."""
    finish_reason: str | None = None
    """TensorRT-LLM's: stop, length, timeout or cancelled."""
    cached_tokens: int = 0
    perf: Any = None
    """TensorRT-LLM's ``RequestPerfMetrics`` so far."""
    error: InflightError | None = None


class Runtime:
    """One ``LLM`` and its event loop. Every method may be called from any thread."""

    def __init__(self, llm: Any, request_error: type[Exception]) -> None:
        """
        Args:
            llm: TensorRT-LLM's ``LLM``.
            request_error: what the API raises for a request that it refuses.
        """
        self._llm = llm
        self._refusals = (request_error, ValueError, TypeError)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._results: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.iteration: dict[str, Any] = {}
        """The newest iteration statistics; replaced as a whole, never changed."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm", daemon=True)
        self._thread.start()

    def generate(self, key: int, make_arguments: Callable[[], dict[str, Any]]) -> None:
        """Begin a generation; its events carry ``key``. ``make_arguments`` returns those of ``generate_async``."""
        self._loop.call_soon_threadsafe(self._start, key, make_arguments)

    def abort(self, key: int) -> None:
        """End a generation, if it still runs."""
        self._loop.call_soon_threadsafe(self._abort, key)

    def take(self, timeout_s: float) -> list[Event]:
        """Return what has come, in order; wait for the first of it for at most ``timeout_s``."""
        events = []
        try:
            events.append(self._events.get(timeout=timeout_s))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def close(self) -> None:
        """End the loop and the engine."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._llm.shutdown()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._keep(self._follow_stats())
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _keep(self, coroutine: Any) -> None:
        """Run a coroutine; the loop itself holds tasks weakly."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start(self, key: int, make_arguments: Callable[[], dict[str, Any]]) -> None:
        try:
            result = self._results[key] = self._llm.generate_async(**make_arguments(), streaming=True)
        except Exception as error:
            self._fail(key, error)
            return
        self._keep(self._follow(key, result))

    def _abort(self, key: int) -> None:
        result = self._results.pop(key, None)
        if result is not None:
            result.abort()

    async def _follow(self, key: int, result: Any) -> None:
        seen = 0
        try:
            async for response in result:
                event = read_response(key, response, seen)
                seen += len(event.tokens)
                self._events.put(event)
        except Exception as error:
            self._fail(key, error)
        finally:
            self._results.pop(key, None)

    def _fail(self, key: int, error: Exception) -> None:
        """Hand over an error as the request's last event: its own fault if the API says so, else ours."""
        reason = " ".join(str(error).split())
        if isinstance(error, self._refusals):
            self._events.put(Event(key, error=InvalidRequest(f"TensorRT-LLM refuses the request: {reason}")))
        else:
            log.error("request %d failed in TensorRT-LLM", key, exc_info=error)
            self._events.put(Event(key, error=EngineFailure("the engine failed; the server's log says why")))

    async def _follow_stats(self) -> None:
        """Keep the newest statistics; without them requests run all the same."""
        try:
            while True:
                async for iteration in self._llm.get_stats_async(timeout=_STATS_TIMEOUT_S):
                    self.iteration = iteration
                await asyncio.sleep(_STATS_PAUSE_S)
        except Exception:
            log.exception("TensorRT-LLM gives no statistics; the metrics of its iterations stay as they are")


def read_response(key: int, response: Any, seen: int) -> Event:
    """Return the event of one response; ``seen`` tokens of the sequence came before.

    Raises:
        RuntimeError: logits do not fit the tokens.
    """
    output = response.outputs[0]
    tokens = list(output.token_ids[seen:])
    log_probs = [{token: one.logprob for token, one in row.items()} for row in (output.logprobs or [])[seen:]]
    logits = None if output.generation_logits is None else _array(output.generation_logits)
    if logits is not None:
        logits = logits[-len(tokens) :] if tokens else logits[:0]
        if len(logits) != len(tokens):
            raise RuntimeError(f"{len(tokens)} new tokens came with {len(logits)} rows of logits")
    context = None if seen or response.context_logits is None else _array(response.context_logits)
    return Event(
        key,
        tokens,
        log_probs,
        logits,
        context,
        output.finish_reason if response.finished else None,
        int(getattr(response, "cached_tokens", 0) or 0),
        output.request_perf_metrics,
    )


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor on any device as float32 [rows, vocab]."""
    array: np.ndarray = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])
