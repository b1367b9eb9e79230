"""Runs TensorRT-LLM's asynchronous generations in one event loop and hands over what they bring as plain events.

The loop has a thread of its own, because the API gives results only to the event loop in which a request was made.
This module knows the API's objects; not sequences, stops or streams.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from inflight.errors import EngineFailure, InflightError, InvalidRequest

log = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 3600.0
"""After a timeout TensorRT-LLM gives no more until another request comes, whatever runs: so none is to be met."""
_STATS_PAUSE_S = 0.1
"""The pause between two reads of the statistics: before its first request TensorRT-LLM answers at once, with none."""
_CLOSE_S = 10.0
"""How long the event loop may take to end, and then the engine."""
_ABORT_GRACE_S = 5.0
"""How long an aborted generation may take to end; TensorRT-LLM drops one that has not begun without a last response."""
_FAILED = "the engine failed; the server's log says why"
_FAULT = re.compile(r"cuda|cublas|cudnn|nccl|out of memory|assertion|\.cu\b|traceback", re.IGNORECASE)
"""Matches the message of a fault of the engine: a step that fails ends its requests by the same class of error as a
refusal."""


def find(module: str, name: str) -> Any:
    """Return ``name`` of the module ``tensorrt_llm.<module>``."""
    return getattr(importlib.import_module(f"tensorrt_llm.{module}"), name)


@dataclass(slots=True)
class Event:
    """What one response of TensorRT-LLM brought for one sequence."""

    key: int
    tokens: list[int] = field(default_factory=list)
    """The tokens since the last event."""
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
    fatal: bool = False
    """Whether the error is the end of the engine, and not of this request alone."""


class Runtime:
    """One ``LLM`` and its event loop. Every method may be called from any thread."""

    def __init__(self, llm: Any, request_error: type[Exception]) -> None:
        """``request_error`` is what ``llm`` raises in a stream: before its first token a refusal, later a fault."""
        self._llm = llm
        self._request_error = request_error
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._open: set[int] = set()
        self._results: dict[int, Any] = {}
        """Those of the open generations that are still read: neither ended nor aborted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._following: dict[int, asyncio.Task[None]] = {}
        """The task of each open generation."""
        self.iteration: dict[str, Any] = {}
        """The newest iteration statistics; replaced as a whole, never changed."""
        self._iterations: deque[dict[str, Any]] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tensorrt-llm", daemon=True)
        self._thread.start()

    @property
    def open(self) -> int:
        """Generations of which TensorRT-LLM has not given the last response; aborted ones count for some seconds."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether no generation is open, and every event has been taken."""
        return not self._open and self._events.empty()  # in this order: a generation's last event comes before its end

    def generate(self, key: int, make_arguments: Callable[[], dict[str, Any]]) -> None:
        """Begin a generation; its events carry ``key``. ``make_arguments`` returns those of ``generate_async``."""
        self._open.add(key)
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

    def take_iterations(self) -> list[dict[str, Any]]:
        """Return the statistics of the iterations since the last call, in order."""
        return [self._iterations.popleft() for _ in range(len(self._iterations))]

    def close(self) -> None:
        """End the loop and the engine; one that does not end in time is left to the end of its process."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        shutdown = threading.Thread(target=self._shut_down, name="tensorrt-llm shutdown", daemon=True)
        self._thread.join(_CLOSE_S)
        shutdown.start()
        shutdown.join(_CLOSE_S)
        if self._thread.is_alive() or shutdown.is_alive():
            log.warning("TensorRT-LLM does not shut down; it is left to the end of this process")

    def _shut_down(self) -> None:
        try:
            self._llm.shutdown()
        except Exception:
            log.exception("TensorRT-LLM could not be shut down")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._keep(self._follow_stats())
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    def _keep(self, coroutine: Any) -> asyncio.Task[None]:
        """Run a coroutine; the loop itself holds tasks weakly."""
        task: asyncio.Task[None] = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start(self, key: int, make_arguments: Callable[[], dict[str, Any]]) -> None:
        try:
            arguments = make_arguments()
            try:
                result = self._results[key] = self._llm.generate_async(**arguments, streaming=True)
                self._following[key] = self._keep(self._follow(key, result))
                return
            except (self._request_error, ValueError, TypeError) as error:
                self._refuse(key, error)
        except Exception as error:
            self._fail(key, error)
        self._open.discard(key)

    def _abort(self, key: int) -> None:
        result = self._results.pop(key, None)
        if result is not None:
            result.abort()
            self._loop.call_later(_ABORT_GRACE_S, self._give_up, key)

    def _give_up(self, key: int) -> None:
        """Take an aborted generation for ended."""
        if task := self._following.get(key):
            log.info("TensorRT-LLM has not said that the aborted request %d has ended; it is taken for ended", key)
            task.cancel()

    async def _follow(self, key: int, result: Any) -> None:
        seen = 0
        try:
            async for response in result:
                seen = self._read(key, response, seen)
            if self._results.pop(key, None) is not None:
                self._fail(key, RuntimeError("TensorRT-LLM ended the stream without a finish reason"))
        except self._request_error as error:
            refused = not seen and key in self._results and not _FAULT.search(str(error))
            (self._refuse if refused else self._fail)(key, error)
        except Exception as error:
            # The API checks each response by assertions; what breaks there is of one request, which goes on behind it.
            self._fail(key, error)
            self._abort(key)
        finally:
            self._results.pop(key, None)
            self._following.pop(key, None)
            self._open.discard(key)

    def _read(self, key: int, response: Any, seen: int) -> int:
        """Hand over one response; return how many tokens have been seen with it."""
        event = Event(key)  # of an aborted generation nothing is wanted but the sign of life
        if key in self._results:
            try:
                event = read_response(key, response, seen)
            except Exception as error:
                self._fail(key, error)
                self._abort(key)
                return seen
        if event.finish_reason is not None:
            self._results.pop(key, None)
        self._events.put(event)
        return seen + len(event.tokens)

    def _refuse(self, key: int, error: Exception) -> None:
        """Hand over a refusal as the request's last event, with what it says."""
        reason = " ".join(str(error).split())
        self._events.put(Event(key, error=InvalidRequest(f"TensorRT-LLM refuses the request: {reason}")))

    def _fail(self, key: int, error: Exception) -> None:
        """Log an error in full, and hand it over as the request's last event, without details."""
        log.error("request %d failed in TensorRT-LLM", key, exc_info=error)
        executor = getattr(self._llm, "_executor", None)
        ended = executor is None or bool(executor.is_shutdown())  # as it does when one of its processes dies
        self._events.put(Event(key, error=EngineFailure(_FAILED), fatal=ended))

    async def _follow_stats(self) -> None:
        """Keep the newest statistics; without them requests run all the same."""
        try:
            while True:
                async for iteration in self._llm.get_stats_async(timeout=_STATS_TIMEOUT_S):
                    self.iteration = iteration
                    self._iterations.append(iteration)
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
        logits = _rows(logits, seen, len(tokens), ended=output.finish_reason == "stop")
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


def _rows(logits: np.ndarray, seen: int, new: int, ended: bool) -> np.ndarray:
    """Return the rows of the new tokens: the API gives those of the last step, or of all steps so far.

    Behind them may be the row of an end id that ended the sequence and is not among its tokens.

    Raises:
        RuntimeError: there are more rows or fewer.
    """
    for first in (0, seen):
        if first + new <= len(logits) <= first + new + ended:
            return logits[first : first + new]
    raise RuntimeError(f"{new} new tokens came with {len(logits)} rows of logits")


def _array(tensor: Any) -> np.ndarray:
    """Return a torch tensor on any device as float32 [rows, vocab]."""
    array: np.ndarray = tensor.float().cpu().numpy()
    return array.reshape(-1, array.shape[-1])
