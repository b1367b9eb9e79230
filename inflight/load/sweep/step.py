"""What one step of a sweep has measured, and what a load did over all the steps that tried it.

It judges one load by itself; which loads are tried is decided by ``search``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from inflight.load.measurements import Figures, RequestRecord
from inflight.load.result import LoadResult

SHORTFALL_LIMIT = 0.05
"""A server that answers less than 95 % of what is offered does not keep up: its queue grows all through the step, or it
refuses."""
_Z = 1.96
"""The standard score of a 95 % interval."""
_SURE_Z = 2.576
"""The standard score of a 99 % interval: a sweep asks many loads, and one false answer ends it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run at one load."""

    load: float
    """Sessions per second (open loop) or sessions at a time (closed loop)."""
    seed: int
    figures: Figures
    """The figures of the steady window."""
    offered: float
    """Requests per second that came in the window."""
    answered: float
    """Requests per second whose answer ended in the window, the cancelled ones of the scenario's own among them."""
    in_flight: tuple[int, int]
    """Requests at the window's begin and at its end."""
    good: int
    """Requests that kept every limit, of ``judged``."""
    judged: int
    left: int
    """Requests that were cut off when the time to drain was over."""
    failed: int
    """Requests of the whole step, warm-up included, that ended with an error."""
    sent: int
    """Requests of the whole step."""
    client_reasons: tuple[str, ...]
    """Why the client was the bottleneck; empty: it was not."""

    @classmethod
    def of(cls, load: float, result: LoadResult) -> Step:
        """Return the step that a load test at ``load`` was."""
        figures, (begin, end) = result.figures, result.window
        done = [one for one in result.records if one.outcome in ("completed", "cancelled")]
        return cls(
            load=load,
            seed=result.seed,
            figures=figures,
            offered=figures.requests / (end - begin),
            answered=sum(begin <= one.ended_s < end for one in done) / (end - begin),
            in_flight=(in_flight(result.records, begin), in_flight(result.records, end)),
            good=round((figures.slo_attainment or 0.0) * figures.judged),
            judged=figures.judged,
            left=sum(one.outcome == "unfinished" for one in result.records),
            failed=sum(one.outcome == "failed" for one in result.records),
            sent=len(result.records),
            client_reasons=result.client.reasons,
        )

    @property
    def window_s(self) -> float:
        """Length of the steady window."""
        return self.figures.window_s[1] - self.figures.window_s[0]


def in_flight(records: Sequence[RequestRecord], at_s: float) -> int:
    """Return how many requests had come and had not ended at a time."""
    return sum(one.start_s < at_s <= one.ended_s for one in records)


@dataclass(frozen=True, slots=True)
class Level:
    """One load and all steps at it, which count as one."""

    load: float
    tried: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that show the server: those whose client was no bottleneck, or all if it always was."""
        return tuple(step for step in self.tried if not step.client_reasons) or self.tried

    @property
    def client_bound(self) -> bool:
        """Whether the client was the bottleneck every time: its figures say nothing of the server."""
        return all(step.client_reasons for step in self.tried)

    @property
    def offered(self) -> float:
        """Requests per second that came."""
        return fmean(step.offered for step in self.steps)

    @property
    def answered(self) -> float:
        """Requests per second that were answered."""
        return fmean(step.answered for step in self.steps)

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens per second."""
        return fmean(step.figures.output_tokens_per_second for step in self.steps)

    @property
    def goodput(self) -> float | None:
        """Requests per second that kept every limit; None: there are no limits."""
        known = [step.figures.goodput for step in self.steps if step.figures.goodput is not None]
        return fmean(known) if known else None

    @property
    def attainment(self) -> float:
        """Share of the requests that kept every limit."""
        judged = sum(step.judged for step in self.steps)
        return sum(step.good for step in self.steps) / judged if judged else 0.0

    @property
    def attainment_interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of ``attainment`` (E. B. Wilson, JASA 22, 1927)."""
        return wilson(sum(step.good for step in self.steps), sum(step.judged for step in self.steps))

    @property
    def shortfall(self) -> float:
        """Share of the offered requests that went unanswered in the window: queued up, refused or failed."""
        return max(0.0, 1 - self.answered / self.offered) if self.offered else 0.0

    @property
    def shortfall_interval(self) -> tuple[float, float]:
        """99 % interval of what the shortfall would be of an endless window.

        The numbers in flight at a window's two ends differ also where nothing queues up. Of Poisson arrivals at a
        server that keeps up each is a Poisson number, and the variance of their difference the sum of the two
        (J. G. Skellam, Journal of the Royal Statistical Society 109, 1946). The longer the requests, the wider it is.
        """
        came = sum(step.offered * step.window_s for step in self.steps)
        if not came:
            return 0.0, 1.0
        half = _SURE_Z * math.sqrt(sum(sum(step.in_flight) for step in self.steps)) / came
        return self.shortfall - half, self.shortfall + half

    @property
    def queue_growth(self) -> float:
        """Requests per second by which the number in flight grew."""
        return fmean((step.in_flight[1] - step.in_flight[0]) / step.window_s for step in self.steps)

    @property
    def keeps_up(self) -> bool:
        """Whether an open loop may be stable: what comes is answered, and the queue grows by no more than by chance."""
        return self.shortfall_interval[0] <= SHORTFALL_LIMIT

    @property
    def keeping_up_is_unsure(self) -> bool:
        """Whether the shortfall is on one side of its limit by chance: the limit is inside the interval."""
        low, high = self.shortfall_interval
        return low < SHORTFALL_LIMIT < high

    @property
    def mean_e2e_s(self) -> float | None:
        """Mean time of a request; None: none completed."""
        known = [step.figures.e2e_ms.mean for step in self.steps if step.figures.e2e_ms is not None]
        return fmean(known) / 1000 if known else None

    @property
    def power(self) -> float:
        """Throughput over latency (L. Kleinrock, ICC 1979), in requests per second per second."""
        return self.answered / self.mean_e2e_s if self.mean_e2e_s else 0.0


def wilson(good: int, judged: int) -> tuple[float, float]:
    """Return the 95 % interval of a share; of no sample it is everything."""
    if not judged:
        return 0.0, 1.0
    share, weight = good / judged, _Z**2 / judged
    middle = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / judged + weight / (4 * judged))
    return max(0.0, middle - half), min(1.0, middle + half)
