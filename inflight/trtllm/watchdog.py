"""The watchdog: an engine that makes no progress while requests run is dead, and so is one that says so; for good."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""The time between an engine's death and the call of ``on_death``, in which the errors reach their clients."""


class Watchdog:
    """Watches one engine. Its owner says when there is progress and asks, often, whether there has been enough."""

    def __init__(self, limit_s: float, start_limit_s: float, on_death: Callable[[], object]) -> None:
        """
        Args:
            limit_s: seconds without progress that make a hang.
            start_limit_s: the same until ``arm``: kernels are compiled and tuned in the first generation.
            on_death: called once, from a thread of its own, ``GRACE_S`` after an armed watchdog finds the engine dead.
        """
        self._limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._on_death = on_death
        self._last = time.monotonic()
        self._armed = False
        self.message = ""
        """The error of a request that meets a dead engine; empty while the engine lives."""

    @property
    def dead(self) -> bool:
        """Whether the engine has hung or failed; it stays so."""
        return bool(self.message)

    def arm(self) -> None:
        """Say that the engine is warm: from now on the limit is the deployment's own, and a death has consequences."""
        self._armed = True
        self.progress()

    def progress(self) -> None:
        """Say that something has come from the engine, or that it has only now got something to do."""
        self._last = time.monotonic()

    def check(self) -> bool:
        """Return whether the engine is dead, by a hang if not already; to be asked while requests run."""
        limit_s = self._limit_s if self._armed else self._start_limit_s
        if not self.dead and time.monotonic() - self._last > limit_s:
            setting = "" if self._armed else ", server.start_timeout_s"
            self.declare_dead(f"TensorRT-LLM has made no progress for {limit_s:g} s{setting}")
        return self.dead

    def declare_dead(self, reason: str) -> None:
        """Declare the engine dead, if it is not already."""
        if self.dead:
            return
        self.message = f"{reason}; the server must be started again"
        log.error("%s", self.message)
        if self._armed:
            threading.Timer(GRACE_S, self._on_death).start()
