"""Load: how many requests run, and whether the gateway still takes new ones."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from inflight.gateway.errors import RETRY_AFTER_S, STOPPING, ApiError, away

MOST_RETRY_AFTER_S = 60


class Load:
    """The requests that run. Only the event loop's thread changes it."""

    def __init__(self, limit: int) -> None:
        """At most ``limit`` requests run at once."""
        self.limit = limit
        self._mean_s = 0.0
        """Seconds that requests take, the last ones counted most."""
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
            raise ApiError(503, message, code="too_many_requests", headers={"retry-after": str(self._retry_after_s())})
        self.running += 1
        self._idle.clear()
        began = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._mean_s += (time.monotonic() - began - self._mean_s) / 16
            if not self.running:
                self._idle.set()

    def _retry_after_s(self) -> int:
        """Return in how many seconds one of the requests that run is likely to have ended."""
        return min(MOST_RETRY_AFTER_S, max(RETRY_AFTER_S, math.ceil(self._mean_s / self.limit)))

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, and wait until none runs, but not longer than ``timeout_s``."""
        self.draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
