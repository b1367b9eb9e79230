"""Prepares long requests in threads of their own, so that short ones do not wait while megabytes are tokenized.

The shortest is next, so a long prompt waits for a longer one only if that has begun already; and all threads but one
leave the longest, which take seconds, to that one. The threads have a lower CPU priority than the engine's steps and
short prompts.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

LONG_BYTES = 16_384
"""A request with more text than this is long: tokenizing this much takes about as long as a few steps of the engine."""
LONGEST_BYTES = 128 << 10
"""A request with so much text is one of the longest, and one whose chat template takes long."""
_NICENESS = 10
"""Added to the threads' niceness: they get about a tenth of a core that others want too (sched(7))."""


class LongRequests:
    """The threads for long requests and their queue."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._closed = self._longest_runs = False
        self._order = itertools.count()
        count = max(2, (os.cpu_count() or 1) // 2)
        self._threads = [
            threading.Thread(target=self._run, name=f"long-requests-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, size: int, task: Callable[[], None]) -> None:
        """Queue a task, which runs once no smaller one waits; ``size`` is its own. Its exceptions are logged."""
        with self._changed:
            self._waiting.append((size, next(self._order), task))
            self._changed.notify()

    def close(self) -> None:
        """End the threads, each after its current task. Triton closes a stage only when its requests have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        thread = threading.get_native_id()  # to Linux, whose threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS)
        while (taken := self._take()) is not None:
            size, _, task = taken
            try:
                task()
            except BaseException:  # a panic of a library, too: the thread must outlive it, since others wait for it
                log.exception("a long request could not be answered")
            finally:
                if size >= LONGEST_BYTES:
                    with self._changed:
                        self._longest_runs = False
                        self._changed.notify()

    def _take(self) -> tuple[int, int, Callable[[], None]] | None:
        """Wait for the shortest task that may run now; None: there are to be no more."""
        with self._changed:
            while not self._closed:
                shortest = min(self._waiting, default=None, key=lambda one: one[:2])
                if shortest is not None and not (self._longest_runs and shortest[0] >= LONGEST_BYTES):
                    self._waiting.remove(shortest)
                    self._longest_runs = self._longest_runs or shortest[0] >= LONGEST_BYTES
                    return shortest
                self._changed.wait()
        return None
