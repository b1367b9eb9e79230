"""Prepares long requests in threads of their own, so that short ones do not wait while megabytes are tokenized.

The shortest is next, so a long prompt waits for a longer one only if that has begun already. The threads have a lower
CPU priority than the engine's steps and short prompts.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from queue import PriorityQueue

log = logging.getLogger(__name__)

LONG_BYTES = 16_384
"""A request with more text than this is long: tokenizing this much takes about as long as a few steps of the engine."""
_NICENESS = 10
"""Added to the threads' niceness: they get about a tenth of a core that others want too (sched(7))."""


class LongRequests:
    """The threads for long requests and their queue."""

    def __init__(self) -> None:
        self._waiting: PriorityQueue[tuple[int, int, Callable[[], None] | None]] = PriorityQueue()
        self._order = itertools.count()
        count = max(2, (os.cpu_count() or 1) // 2)
        self._threads = [
            threading.Thread(target=self._run, name=f"long-requests-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, size: int, task: Callable[[], None]) -> None:
        """Queue a task, which runs once no smaller one waits; ``size`` is its own. Its exceptions are logged."""
        self._waiting.put((size, next(self._order), task))

    def close(self) -> None:
        """End the threads, each after its current task. Triton closes a stage only when its requests have ended."""
        for _ in self._threads:
            self._waiting.put((-1, next(self._order), None))

    def _run(self) -> None:
        thread = threading.get_native_id()  # to Linux, whose threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        while (task := self._waiting.get()[2]) is not None:
            try:
                task()
            except Exception:  # the thread must outlive it: others wait for it
                log.exception("a long request could not be answered")
