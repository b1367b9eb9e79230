"""A stopwatch for work that computes and never waits."""

from __future__ import annotations

import time


class Stopwatch:
    """Measures the seconds since it was made, without those in which the machine ran something else.

    With one thread, the processor time of this process is what the work would take on an idle machine; with several it
    adds up over the threads, and the clock on the wall is the smaller one.
    """

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return min(time.perf_counter() - self._wall, time.process_time() - self._processor)
