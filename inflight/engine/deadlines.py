"""Deadlines: whose has passed. It knows when, not what follows from it."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from inflight.engine.sequence import Sequence

_STALE = 64


class Deadlines:
    """Sequences by their deadlines. One that has left is dropped when it comes up, or when such are most of them."""

    def __init__(self, is_open: Callable[[Sequence], bool]) -> None:
        """
        Args:
            is_open: whether a sequence has not left.
        """
        self._is_open = is_open
        self._heap: list[tuple[int, int, Sequence]] = []
        self._limit = _STALE

    def __len__(self) -> int:
        """How many are kept, those that have left included."""
        return len(self._heap)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, if it has a deadline."""
        if sequence.request.deadline_ns is None:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if self._is_open(entry[2])]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + _STALE
        heapq.heappush(self._heap, (sequence.request.deadline_ns, sequence.order, sequence))

    def take_passed(self, now_ns: int) -> list[Sequence]:
        """Return, once, those that are open and whose deadline is not after ``now_ns``."""
        passed = []
        while self._heap and self._heap[0][0] <= now_ns:
            sequence = heapq.heappop(self._heap)[2]
            if self._is_open(sequence):
                passed.append(sequence)
        return passed

    def within_s(self, seconds: float, now_ns: int) -> float:
        """Return the seconds to the next deadline, or ``seconds`` where that is sooner."""
        return min(seconds, max(0.0, (self._heap[0][0] - now_ns) / 1e9)) if self._heap else seconds
