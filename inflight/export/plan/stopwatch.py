"""Stopwatch: seconds of work, on a machine that others use too."""

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
        return min(self._elapsed)

    @property
    def own_share(self) -> float:
        """The share of the time on the wall that these seconds are."""
        wall, processor = self._elapsed
        return min(1.0, processor / wall)

    @property
    def _elapsed(self) -> tuple[float, float]:
        """Seconds on the wall, and of processor time."""
        return time.perf_counter() - self._wall, time.process_time() - self._processor
