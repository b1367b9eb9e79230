"""The results: one object per request, changed by each response and yielded again, as the real one is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any


class RequestError(RuntimeError):
    """What is wrong with one request: a refusal, or a fault of the engine while it runs."""


@dataclass(slots=True)
class Logprob:
    """A token's log-prob and its rank."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a result."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    request_perf_metrics: Any = None
    _last_token_ids_len: int = field(default=0, init=False)

    @property
    def token_ids_diff(self) -> list[int]:
        """What is new since the last response."""
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """An asynchronous iterator that yields itself, and can be awaited for the whole."""

    def __init__(self, request_id: int, prompt: list[int], abort: Any) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput(0)]
        self.context_logits: Any = None
        self.cached_tokens = 0
        self.finished = False
        self._abort = abort
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self._queue: asyncio.Queue[Any] | None = asyncio.Queue()
        except RuntimeError:
            self._loop = self._queue = None

    def put(self, response: Any) -> None:
        """Hand over a response (a function that changes this object), an error or the bare end, from any thread."""
        if self._loop is not None and self._queue is not None:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, response)

    def abort(self) -> None:
        """End the request; a response with the reason "cancelled" follows."""
        self._abort(self.request_id)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        assert self._queue is not None, "The asyncio event loop was not present during initialization."
        response = await self._queue.get()
        if response is None:
            self.finished = True
            raise StopAsyncIteration
        if isinstance(response, Exception):
            self.finished = True
            raise response
        response(self)
        return self


def perf_metrics(metrics: Any, tokens_per_block: int) -> Any:
    """Return what ``RequestPerfMetrics`` has, from the portable engine's; times are of a clock of its own."""

    def at(nanoseconds: int) -> timedelta:
        return timedelta(microseconds=nanoseconds / 1000) - timedelta(days=20_000)

    return SimpleNamespace(
        timing_metrics=SimpleNamespace(
            arrival_time=at(metrics.arrival_ns),
            first_scheduled_time=at(metrics.first_scheduled_ns),
            first_token_time=at(metrics.first_token_ns),
            last_token_time=at(metrics.last_token_ns),
        ),
        kv_cache_metrics=SimpleNamespace(
            num_total_allocated_blocks=metrics.total_blocks,
            num_new_allocated_blocks=metrics.new_blocks,
            num_reused_blocks=metrics.reused_blocks,
            num_missed_blocks=metrics.new_blocks,
            kv_cache_hit_rate=0.0,
        ),
        speculative_decoding=SimpleNamespace(acceptance_rate=0.0, total_accepted_draft_tokens=0, total_draft_tokens=0),
    )
