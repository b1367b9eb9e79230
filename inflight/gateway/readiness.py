"""Readiness: whether the engine can be called, looked at again and again, so that no request has to ask."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from inflight.client.answer import Health
from inflight.client.grpc_transport import GrpcTransport
from inflight.gateway.errors import away
from inflight.gateway.metrics import GatewayMetrics

log = logging.getLogger(__name__)

LOOK_S, LOOK_AWAY_S = 0.5, 0.1
"""Seconds between two looks at an engine that is ready, and at one that is away."""


class Readiness:
    """Whether the engine's model answers on its gRPC port. Its own task is the one writer."""

    def __init__(self, transport: GrpcTransport, metrics: GatewayMetrics) -> None:
        self._transport, self._metrics = transport, metrics
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while there is nothing to wait for: the engine is ready, or ``give_up`` was called."""
        self._given_up = False
        self.ready = False
        self.starts = 0
        """How many times the engine has been seen to become ready."""

    def check(self) -> None:
        """Raises ApiError: 503 with ``Retry-After`` while the engine is away."""
        if not self.ready:
            raise away()

    async def comes(self, timeout_s: float) -> bool:
        """Wait until the engine can be called, but not longer than ``timeout_s``; return whether it can."""
        if not self._settled.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._settled.wait()
        return self.ready

    def give_up(self) -> None:
        """Let nobody wait any more: the gateway stops."""
        self._given_up = True
        self._settled.set()

    async def look(self) -> None:
        """Look once."""
        ready = await self._transport.health() is Health.READY
        if ready != self.ready:
            log.info("the engine is %s", "ready" if ready else "away")
        self.show(ready)

    def show(self, ready: bool) -> None:
        """Have everybody know whether the engine can be called."""
        self.starts += ready and not self.ready
        self.ready = ready
        if ready:
            self._settled.set()
        elif not self._given_up:
            self._settled.clear()
        self._metrics.engine_ready(ready)

    async def start(self) -> None:
        """Look once, and then again and again until ``stop``."""
        await self.look()
        self._task = asyncio.create_task(self._keep_looking(), name="readiness")

    async def stop(self) -> None:
        """Stop looking, and close the connection."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._transport.close()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S if self.ready else LOOK_AWAY_S)
            try:
                await self.look()
            except Exception:
                log.exception("looking at the engine failed")
                self.show(False)
