"""How long a client waits and how often it tries: limits, retries, and one wait that can be broken off.

Knows nothing of what is waited for.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from inflight.client.errors import RequestTimeout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one request in seconds; None: no limit."""

    first_chunk: float | None = 300.0
    """From the call to the first chunk of a stream."""
    between_chunks: float | None = 60.0
    """From one chunk of a stream to the next."""
    total: float | None = None
    """From the call to the end; the only limit of a request that does not stream."""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a request that has answered nothing yet is tried again: pauses double and are shaken, not to come in step.

    Only a connection that was refused or broke, a full queue and a server that stops are tried again, and only before
    the first chunk: after it a second try could show another answer.
    """

    attempts: int = 4
    """Tries in all; 1: no second one."""
    first_pause: float = 0.2
    """Seconds."""
    longest_pause: float = 5.0

    def pauses(self) -> Iterator[float | None]:
        """Yield for each try the seconds to pause after it should it fail; None: give up."""
        for attempt in range(self.attempts - 1):
            yield min(self.first_pause * 2**attempt, self.longest_pause) * random.uniform(0.5, 1.0)
        yield None


class Patience:
    """Waits for the steps of one request, as long as its timeouts allow or until ``interrupt`` is called."""

    def __init__(self, timeouts: Timeouts, *, stream: bool) -> None:
        self._timeouts = timeouts
        self._stream = stream
        self._started = time.monotonic()
        self._arrived: float | None = None
        self._pending: asyncio.Future[Any] | None = None
        self.interrupted = False

    def arrived(self) -> None:
        """Note that a chunk has arrived."""
        self._arrived = time.monotonic()

    def interrupt(self) -> None:
        """Break off the wait in progress and refuse all later ones; from the same event loop, any task."""
        self.interrupted = True
        if self._pending is not None:
            self._pending.cancel()

    async def wait(self, step: Awaitable[T]) -> T | None:
        """Return the result of ``step``, or None if interrupted. ``step`` never outlives this call.

        Raises:
            RequestTimeout: naming the limit that passed.
        """
        limit, name, seconds = self._nearest_limit()
        task = self._pending = asyncio.ensure_future(step)
        if self.interrupted:
            task.cancel()
        try:
            await asyncio.wait({task}, timeout=None if limit is None else max(limit - time.monotonic(), 0.0))
            if not task.done():
                raise RequestTimeout(f"{name} of {seconds:g} s passed")
            return None if self.interrupted and task.cancelled() else task.result()
        finally:
            self._pending = None
            if not task.done():
                task.cancel()
                await _end_of(task)

    def _nearest_limit(self) -> tuple[float | None, str, float]:
        """Return the moment, name and seconds of the limit that passes first."""
        limits = [(self._started, "total", self._timeouts.total)]
        if self._stream and self._arrived is None:
            limits.append((self._started, "first_chunk", self._timeouts.first_chunk))
        elif self._stream and self._arrived is not None:
            limits.append((self._arrived, "between_chunks", self._timeouts.between_chunks))
        moments = [(since + seconds, name, seconds) for since, name, seconds in limits if seconds is not None]
        return min(moments, default=(None, "", 0.0))


async def _end_of(task: asyncio.Future[Any]) -> None:
    """Wait until a cancelled task has ended, also if the waiting is cancelled meanwhile: that is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
