"""The watchdog: an engine that makes no progress while requests run is hung, and hung for good."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""Between the first sight of a hang and the call of ``on_hang``: the errors reach their clients in it."""


class Watchdog:
    """Watches one engine. Its owner says when there is progress and asks, often, whether there has been enough."""

    def __init__(
        self, limit_s: float, on_hang: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            limit_s: seconds without progress that make a hang.
            on_hang: called once, from a thread of its own, ``GRACE_S`` after a hang is seen.
            clock: seconds.
        """
        self._limit_s = limit_s
        self._on_hang = on_hang
        self._clock = clock
        self._last = clock()
        self.hung = False
        """Whether the engine has hung; it stays so."""

    @property
    def message(self) -> str:
        """What a request is told that meets a hung engine."""
        return f"TensorRT-LLM has made no progress for {self._limit_s:g} s; the server must be started again"

    def progress(self) -> None:
        """Say that something has come from the engine, or that it has only now got something to do."""
        self._last = self._clock()

    def bites(self) -> bool:
        """Return whether a hang is seen, the one time; to be asked while requests run."""
        if self.hung or self._clock() - self._last <= self._limit_s:
            return False
        self.hung = True
        log.error("%s", self.message)
        threading.Timer(GRACE_S, self._on_hang).start()
        return True
