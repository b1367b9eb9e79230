"""How many users the phases of a closed loop ask for. Does not import locust, which patches the whole process."""

from __future__ import annotations

import math
from collections.abc import Sequence

from inflight.load.arrivals import Phase, starts


def level(phases: Sequence[Phase], now: float) -> int:
    """Return how many sessions of a closed loop are to run at a time, in seconds from the begin; 0 after the end."""
    for begin, phase in zip(starts(phases), phases, strict=False):
        if now < begin + phase.duration_s:
            first, last = phase.ends
            return math.ceil(first + (last - first) * (now - begin) / phase.duration_s)
    return 0
