"""Load: how many requests run, and whether the gateway still takes new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from inflight.gateway.errors import RETRY_AFTER_S, STOPPING, ApiError, away


class Load:
    """The requests that run. Only the event loop's thread changes it."""

    def __init__(self, limit: int) -> None:
        """At most ``limit`` requests run at once."""
        self.limit = limit
        self.running = 0
        self.draining = False
        """Whether the gateway stops, and takes no more requests."""
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Hold the place of a request.

        Raises:
            ApiError: 503 with ``Retry-After``: there are too many, or the gateway stops.
        """
        if self.draining:
            raise away(STOPPING)
        if self.running >= self.limit:
            message = f"{self.running} requests are under way, which is the limit (gateway.max_concurrent_requests)"
            raise ApiError(503, message, code="too_many_requests", headers={"retry-after": str(RETRY_AFTER_S)})
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait until none runs, but not longer than ``timeout_s``."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
