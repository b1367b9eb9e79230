"""What the client itself costs a measurement: late event loop, busy process, late sends; and whether that was too much.

A load generator that cannot keep up measures itself. It is asked the whole time: a timer of the event loop shows how
late whatever arrives is looked at, and the process's CPU time how near it is to the one core that Python uses.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from inflight.load.measurements import Distribution

LAG_LIMIT_MS = 20.0
"""The event loop's lag at the 99th percentile: a chunk's time may be wrong by so much, which is much for a TTFT."""
CPU_LIMIT = 0.8
"""The share of one core above which queues inside the client begin to grow."""
SEND_DELAY_LIMIT_MS = 20.0
"""The delay at the 99th percentile above which the server does not get the load that was scheduled."""
_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """The client's own share in a measurement, over the measured window."""

    loop_lag_ms: Distribution | None
    """How late a timer of the event loop comes, with those that were not set because the loop was held up."""
    cpu_share: float | None
    """CPU time of the client's process, as a share of one core."""
    send_delay_ms: Distribution | None
    """Time from the scheduled to the real sending; None in a closed loop."""
    bottleneck: bool
    """Whether a limit was passed: figures may be the client's and not the server's."""
    reasons: tuple[str, ...]
    """Which limits were passed, and by what."""


@dataclass
class LoopWatch:
    """Samples the event loop that it runs in."""

    clock: Callable[[], float]
    """Seconds from the begin of the load."""
    samples: list[tuple[float, float, float]] = field(default_factory=list)
    """Time, lag, and CPU time of the process so far, each in seconds."""

    async def watch(self) -> None:
        """Sample until cancelled."""
        while True:
            due = self.clock() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            now = self.clock()
            self.samples.append((now, max(0.0, now - due), time.process_time()))

    def health(self, window: tuple[float, float], send_delay_ms: Distribution | None) -> ClientHealth:
        """Return the client's share in what was measured in ``window``."""
        inside = [sample for sample in self.samples if window[0] <= sample[0] < window[1]]
        lag = Distribution.of([late for _, lag, _ in inside for late in _missed(lag)], 1000)
        share = None
        if len(inside) > 1:
            (first, _, cpu_before), (last, _, cpu_after) = inside[0], inside[-1]
            share = (cpu_after - cpu_before) / (last - first)
        reasons = []
        if lag is not None and lag.p99 > LAG_LIMIT_MS:
            reasons.append(f"event loop lag is {lag.p99:.1f} ms at the 99th percentile (limit: {LAG_LIMIT_MS:g} ms)")
        if share is not None and share > CPU_LIMIT:
            reasons.append(f"the client used {share:.0%} of a core (limit: {CPU_LIMIT:.0%})")
        if send_delay_ms is not None and send_delay_ms.p99 > SEND_DELAY_LIMIT_MS:
            late = f"sends were {send_delay_ms.p99:.1f} ms late at the 99th percentile"
            reasons.append(f"{late} (limit: {SEND_DELAY_LIMIT_MS:g} ms)")
        return ClientHealth(lag, share, send_delay_ms, bool(reasons), tuple(reasons))


def _missed(lag_s: float) -> Iterator[float]:
    """Yield the lag of a timer, and of those that would have come while it was waited for.

    Without them a loop that stands still for a second is one sample among many (coordinated omission, corrected by the
    expected interval as in HdrHistogram, G. Tene).
    """
    yield lag_s
    yield from (lag_s - count * _PERIOD_S for count in range(1, math.ceil(lag_s / _PERIOD_S)))
