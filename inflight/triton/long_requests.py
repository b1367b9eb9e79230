"""Prepares long requests in threads of their own, so that short ones do not wait while megabytes are tokenized.

A shorter one is next, unless a longer one has waited for a second more for each MiB that it is longer, so that all have
their turn. All threads but one leave the longest, which take seconds, to that one. The threads have a lower CPU
priority than the engine's steps and short prompts.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

log = logging.getLogger(__name__)

LONG_BYTES = 16_384
"""A request with more text than this is long: tokenizing this much takes about as long as a few steps of the engine."""
LONGEST_BYTES = 128 << 10
"""A request with so much text is one of the longest, and one whose chat template takes long."""
_HEAD_START_S = 1 / (1 << 20)
"""Seconds that a shorter request may come later and still be first, for each byte that it has less."""
_NICENESS = 10
"""Added to the threads' niceness: they get about a tenth of a core that others want too (sched(7))."""


class _Task(NamedTuple):
    rank: float
    """The smallest is next."""
    order: int
    is_longest: bool
    run: Callable[[], None]


class LongRequests:
    """The threads for long requests and their queue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` returns seconds."""
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: list[_Task] = []
        self._closed = self._longest_runs = False
        self._order = itertools.count()
        count = max(2, (os.cpu_count() or 1) // 2)
        self._threads = [
            threading.Thread(target=self._run, name=f"long-requests-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, size: int, task: Callable[[], None]) -> None:
        """Queue a task; ``size``: the bytes of its text. Its exceptions are logged."""
        rank = self._clock() + size * _HEAD_START_S
        with self._changed:
            self._waiting.append(_Task(rank, next(self._order), size >= LONGEST_BYTES, task))
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
            try:
                taken.run()
            except BaseException:  # a panic of a library, too: the thread must outlive it, since others wait for it
                log.exception("a long request could not be answered")
            finally:
                if taken.is_longest:
                    with self._changed:
                        self._longest_runs = False
                        self._changed.notify()

    def _take(self) -> _Task | None:
        """Wait for the next task that may run now; None: there are to be no more."""
        with self._changed:
            while not self._closed:
                ready = [one for one in self._waiting if not (self._longest_runs and one.is_longest)]
                if ready:
                    first = min(ready, key=lambda one: (one.rank, one.order))
                    self._waiting.remove(first)
                    self._longest_runs = self._longest_runs or first.is_longest
                    return first
                self._changed.wait()
        return None
