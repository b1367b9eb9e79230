"""Sends one request and writes down what is seen of it.

``sending`` and ``take`` are all that another transport needs: locust's users, which have no asyncio, use them too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from inflight.client import AsyncClient, AsyncHttpClient, AsyncStream, Chunk
from inflight.errors import InflightError, QueueFull, ShuttingDown
from inflight.load.measurements import Arrival, RequestRecord
from inflight.load.workload import Session

REFUSED = (QueueFull, ShuttingDown)
"""Errors of a server that did not take a request; others are failures."""


class Observation:
    """One request under way: ``record`` is what has been seen of it, ``text`` the answer so far."""

    def __init__(
        self,
        session: Session,
        turn: int,
        clock: Callable[[], float],
        scheduled_s: float | None = None,
        block_tokens: int | None = None,
    ) -> None:
        """
        Args:
            session: whose request number ``turn`` it is.
            turn: counts from 0.
            clock: tells the seconds since the begin of the load.
            scheduled_s: when it should be sent; None in a closed loop.
            block_tokens: tokens of a KV cache block of the server; None: it is not known, and with it how many tokens
                came from the cache.
        """
        self.session, self.turn, self.text = session, turn, ""
        self._clock, self._block_tokens = clock, block_tokens
        self._arrivals: list[Arrival] = []
        self._counted = 0
        """Output tokens up to the last text."""
        self._last: Chunk | None = None
        self.record = RequestRecord(
            session=session.number,
            turn=turn,
            class_name=session.class_name,
            sent_s=0.0,
            ended_s=0.0,
            outcome="unfinished",
            request_id=uuid4().hex,
            scheduled_s=scheduled_s,
            arrivals=self._arrivals,
        )

    async def run(
        self, client: AsyncClient | AsyncHttpClient, answers: list[str], on_text: Callable[[RequestRecord, int], None]
    ) -> None:
        """Send the request and read its stream to the end, or until it is to be cancelled.

        Args:
            client: where to.
            answers: the server's, to the turns before.
            on_text: called for each response with text, with its new tokens.
        """
        prompt, options = self.session.prompt(self.turn, answers), self.session.options(self.turn)
        after_s, canceller = self.session.turns[self.turn].cancel_after_s, None
        with self.sending():
            async with client.stream(prompt, options, request_id=self.record.request_id) as stream:
                if after_s is not None:
                    canceller = asyncio.create_task(_cancel_later(stream, after_s))
                try:
                    async for chunk in stream:
                        new = self.take(chunk)
                        if chunk.text:
                            on_text(self.record, new)
                        if self.cancel_due:
                            break
                finally:
                    if canceller is not None:
                        canceller.cancel()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send the request inside; the block's end is the answer's, and an InflightError the request's own failure."""
        record = self.record
        record.sent_s = self._clock()
        try:
            yield
            if record.finish_reason in ("stop", "length"):
                record.outcome = "completed"
            elif record.finish_reason is None:
                record.outcome = "cancelled"
            else:
                record.outcome = "failed"
                record.error = f"ended_{record.finish_reason}: the server ended the request"
        except InflightError as error:
            record.outcome = "refused" if isinstance(error, REFUSED) else "failed"
            record.error = f"{error.label}: {error}"
        finally:
            if not record.completed:
                record.ended_s = self._clock()
            self._read_times()

    @property
    def cancel_due(self) -> bool:
        """Whether so many tokens have come that the client is to cancel."""
        after = self.session.turns[self.turn].cancel_after_tokens
        return after is not None and self.record.output_tokens >= after

    def take(self, chunk: Chunk) -> int:
        """Note one response; return its new tokens."""
        now, record, self._last = self._clock(), self.record, chunk
        record.ended_s, record.finish_reason = now, chunk.finish_reason
        if chunk.usage.output_tokens is not None:
            record.output_tokens = chunk.usage.output_tokens
        if chunk.usage.input_tokens is not None:
            record.input_tokens = chunk.usage.input_tokens
        if not chunk.text:
            return 0
        new, self._counted = record.output_tokens - self._counted, record.output_tokens
        self._arrivals.append(Arrival(now, new))
        self.text += chunk.text
        return new

    def _read_times(self) -> None:
        """Take over what the last response says of the server's queue and prefix cache."""
        names = ("kv_cache_reused_blocks", "arrival_time_ns", "first_scheduled_time_ns")
        outputs = self._last.outputs if self._last else {}
        blocks, arrival, scheduled = (next(iter(outputs.get(name, ())), None) for name in names)
        if blocks is not None and self._block_tokens is not None:
            self.record.cached_tokens = blocks * self._block_tokens
        if arrival and scheduled:  # a difference of two times of the server's own clock, never of ours
            self.record.queue_s = (scheduled - arrival) / 1e9


async def _cancel_later(stream: AsyncStream, seconds: float) -> None:
    await asyncio.sleep(seconds)
    await stream.cancel()
