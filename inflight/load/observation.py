"""Sends one request and writes down what is seen of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from inflight.client import AsyncClient, AsyncHttpClient, AsyncStream, Chunk
from inflight.errors import InflightError, QueueFull, ShuttingDown
from inflight.load.measurements import Arrival, Outcome, RequestRecord
from inflight.load.workload import Session

REFUSED = (QueueFull, ShuttingDown)
"""Errors of a server that did not take a request; others are failures."""


@dataclass
class Observation:
    """One request under way; ``record`` is what became of it."""

    session: Session
    turn: int
    clock: Callable[[], float]
    """Seconds from the begin of the load."""
    scheduled_s: float | None = None
    block_tokens: int | None = None
    """Tokens of a KV cache block of the server; None: unknown, and with it how many tokens came from the cache."""
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """What the server's traces and logs call it."""
    text: str = ""
    _sent_s: float = 0.0
    _ended_s: float = 0.0
    _outcome: Outcome = "unfinished"
    _error: str = ""
    _arrivals: list[Arrival] = field(default_factory=list)
    _counted: int = 0
    """Output tokens up to the last text."""
    _last: Chunk | None = None
    _output_tokens: int = 0
    _input_tokens: int | None = None

    async def run(
        self,
        client: AsyncClient | AsyncHttpClient,
        answers: list[str],
        on_text: Callable[[Observation, int], None] = lambda _observation, _tokens: None,
    ) -> None:
        """Send the request and read its stream to the end, or until it is to be cancelled.

        Args:
            client: where to.
            answers: the server's, to the turns before.
            on_text: called for each response with text, with its new tokens.
        """
        prompt, options = self.session.prompt(self.turn, answers), self.session.options(self.turn)
        self._sent_s = self.clock()
        try:
            async with client.stream(prompt, options, request_id=self.request_id) as stream:
                await self._read(stream, on_text)
        except InflightError as error:
            self._outcome = "refused" if isinstance(error, REFUSED) else "failed"
            self._error = f"{error.label}: {error}"
        finally:
            if self._outcome != "completed":
                self._ended_s = self.clock()

    async def _read(self, stream: AsyncStream, on_text: Callable[[Observation, int], None]) -> None:
        turn = self.session.turns[self.turn]
        canceller = None
        if turn.cancel_after_s is not None:
            canceller = asyncio.create_task(_cancel_later(stream, turn.cancel_after_s))
        try:
            async for chunk in stream:
                new = self._take(chunk)
                if chunk.text:
                    on_text(self, new)
                if turn.cancel_after_tokens is not None and self._output_tokens >= turn.cancel_after_tokens:
                    break
        finally:
            if canceller is not None:
                canceller.cancel()
        self._judge()

    def _take(self, chunk: Chunk) -> int:
        """Note one response; return its new tokens."""
        now = self.clock()
        self._last = chunk
        self._ended_s = now
        if chunk.usage.output_tokens is not None:
            self._output_tokens = chunk.usage.output_tokens
        if chunk.usage.input_tokens is not None:
            self._input_tokens = chunk.usage.input_tokens
        if not chunk.text:
            return 0
        new, self._counted = self._output_tokens - self._counted, self._output_tokens
        self._arrivals.append(Arrival(now, new))
        self.text += chunk.text
        return new

    def _judge(self) -> None:
        """Say how a stream ended that had no error."""
        reason = self._last.finish_reason if self._last else None
        if reason in ("stop", "length"):
            self._outcome = "completed"
        elif reason is None:
            self._outcome = "cancelled"
        else:
            self._outcome, self._error = "failed", f"ended_{reason}: the server ended the request"

    @property
    def completed(self) -> bool:
        """Whether the whole answer has come."""
        return self._outcome == "completed"

    @property
    def responses(self) -> int:
        """How many had text so far."""
        return len(self._arrivals)

    @property
    def first_text_s(self) -> float | None:
        """From the start to the first text."""
        return self._arrivals[0].time_s - self._start_s if self._arrivals else None

    @property
    def _start_s(self) -> float:
        return self._sent_s if self.scheduled_s is None else self.scheduled_s

    def record(self) -> RequestRecord:
        """Return what was seen."""
        return RequestRecord(
            session=self.session.number,
            turn=self.turn,
            class_name=self.session.class_name,
            request_id=self.request_id,
            sent_s=self._sent_s,
            ended_s=self._ended_s,
            outcome=self._outcome,
            scheduled_s=self.scheduled_s,
            arrivals=tuple(self._arrivals),
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens(),
            queue_s=self._queue_s(),
            finish_reason=self._last.finish_reason if self._last else None,
            error=self._error,
        )

    def _output(self, name: str) -> int | None:
        """Return an output of the last response."""
        return next(iter(self._last.outputs.get(name, ())), None) if self._last else None

    def _cached_tokens(self) -> int | None:
        blocks = self._output("kv_cache_reused_blocks")
        return None if blocks is None or self.block_tokens is None else blocks * self.block_tokens

    def _queue_s(self) -> float | None:
        """Return the time in the server's queue: a difference of two times of its own clock, never of ours."""
        arrival, scheduled = self._output("arrival_time_ns"), self._output("first_scheduled_time_ns")
        return (scheduled - arrival) / 1e9 if arrival and scheduled else None


async def _cancel_later(stream: AsyncStream, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await stream.cancel()
