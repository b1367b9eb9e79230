"""Which loads a sweep tries, and what it finds: the knee of the throughput-latency curve, and the highest load that
keeps the limits.

It tries higher loads until the server is saturated, and then comes closer and closer to both points. It calls a
function that measures one load, and knows nothing of servers and requests.

R. Jain (The Art of Computer Systems Performance Analysis, 1991, section 3.3) calls the two the knee capacity and the
usable capacity. Where the knee is depends on the loop:

closed loop   the concurrency with the most power, throughput / mean latency (L. Kleinrock, "Power and Deterministic
              Rules of Thumb", ICC 1979). Below it a request more adds throughput, above it only waiting. Of a server
              with c places that is c, or as N = X * R says (Little's law) the N at which the asymptotes
              X = N / R_min and X = X_max meet.
open loop     the rate at which the asymptotes X = offered and X = X_max meet: below it everything is answered, above
              it the queue grows for as long as the load lasts, and latencies say how long that was and nothing else.
              X_max is the highest throughput of all steps; steps above the knee show it best, as they never idle. A
              session is one request there, so the knee is at X_max sessions per second.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inflight.load.sweep.step import Level, Step

GAIN_LIMIT = 0.05
"""A closed loop is saturated where twice the concurrency answers less than 5 % more; half of that for half a step."""
_TELLING_STEP = math.sqrt(2)
"""A load is compared with those that it is so many times as high as, lest noise decides over small steps."""
STEPS_PAST_KNEE = 4
"""How many higher loads a saturated closed loop may be tried with until its limits break."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a load."""

    passes: Callable[[Level], bool]
    unsure: Callable[[Level], bool]
    """Whether noise may have decided."""


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep is to find, and how closely."""

    open: bool
    """Whether loads are sessions per second; else sessions at a time."""
    low: float
    high: float
    """The lowest and the highest load to try."""
    factor: float = 2.0
    """Ratio of two neighbouring loads on the way up."""
    tolerance: float = 0.05
    """The two loads that an answer lies between differ by no more, as a share; neighbouring numbers of sessions may."""
    share: float | None = None
    """Share of the requests that must keep every limit; None: there are no limits to keep."""
    repeats: int = 3
    """How often a load is measured at most, where noise decides."""


class Search:
    """One sweep. ``levels`` has what was measured, also when ``run`` was interrupted."""

    def __init__(self, plan: SweepPlan, measure: Callable[[float, int], Step]) -> None:
        """``measure`` runs one step at a load; its second argument counts the load's repeats, from 0."""
        self.plan = plan
        self._measure = measure
        self._tried: dict[float, list[Step]] = {}

    @property
    def levels(self) -> list[Level]:
        """All loads that were measured, in rising order."""
        return [Level(load, tuple(steps)) for load, steps in sorted(self._tried.items())]

    def run(self) -> None:
        """Measure until everything is found that can be."""
        self._go_up()
        if self.plan.open:
            self._close_in(KEEPING_UP)
        else:
            self._close_in_on_power()
        if self.plan.share is not None:
            self._close_in(keeping_limits(self.plan))

    def _go_up(self) -> None:
        """Raise the load until the server is saturated and its limits are broken."""
        load, past_knee = self._whole(self.plan.low), 0
        while True:
            level = self._at(load)
            if level.client_bound or load >= self.plan.high:
                return
            if self.plan.open and not level.keeps_up:  # one that noise decides is told by the next higher
                return
            if not self.plan.open and self._gains_no_more():
                past_knee += 1
                limits_hold = self.plan.share is not None and keeping_limits(self.plan).passes(level)
                if not limits_hold or past_knee > STEPS_PAST_KNEE:
                    return
            higher = self._whole(load * self.plan.factor)
            load = min(higher if self.plan.open else max(higher, load + 1), self.plan.high)

    def _gains_no_more(self) -> bool:
        *_, last = levels = self.levels
        lower = [level for level in levels if level.load * _TELLING_STEP <= last.load]
        if not lower:
            return False
        needed = 1 + GAIN_LIMIT * min(1.0, last.load / lower[-1].load - 1)
        return last.answered < needed * max(level.answered for level in lower)

    def _close_in(self, question: Question) -> None:
        """Halve the gap between the highest load that passes and the first that does not."""
        while True:
            passing, failing = borders(self.levels, question.passes)
            unsure = [level for level in (passing, failing) if level and question.unsure(level)]
            again = [level for level in unsure if self._may_repeat(level)]
            if again:
                self._again(again[0].load)
            elif passing is None or failing is None or self._close(passing.load, failing.load):
                return
            else:
                self._at(self._whole(math.sqrt(passing.load * failing.load)))

    def _close_in_on_power(self) -> None:
        """Halve the gaps on either side of the load with the most power, the wider one first."""
        while True:
            levels = [level for level in self.levels if not level.client_bound]
            if not levels:
                return
            best = levels.index(max(levels, key=lambda level: level.power))
            loads = [level.load for level in levels[max(0, best - 1) : best + 2]]
            gaps = [gap for gap in itertools.pairwise(loads) if not self._close(*gap)]
            if not gaps:
                return
            low, high = max(gaps, key=lambda gap: gap[1] / gap[0])
            if self._at(self._whole(math.sqrt(low * high))).client_bound:
                return

    def _at(self, load: float) -> Level:
        """Return a load's level; it is measured if it was not, and again while the client is the bottleneck."""
        level = Level(load, tuple(self._tried[load])) if load in self._tried else self._again(load)
        while level.client_bound and self._may_repeat(level):
            level = self._again(load)
        return level

    def _again(self, load: float) -> Level:
        steps = self._tried.get(load, [])
        self._tried[load] = [*steps, self._measure(load, len(steps))]
        return Level(load, tuple(self._tried[load]))

    def _may_repeat(self, level: Level) -> bool:
        return len(level.tried) < self.plan.repeats

    def _whole(self, load: float) -> float:
        return load if self.plan.open else max(1, round(load))

    def _close(self, low: float, high: float) -> bool:
        return high <= low * (1 + self.plan.tolerance) or (not self.plan.open and high - low <= 1)


KEEPING_UP = Question(
    lambda level: level.keeps_up and not level.client_bound, unsure=lambda level: level.keeping_up_is_unsure
)
"""Whether the server, and not the client, keeps up with an open loop."""


def keeping_limits(plan: SweepPlan) -> Question:
    """Return the question whether a load is one at which the limits hold: of an open loop, a stable one."""
    share = plan.share
    assert share is not None

    def passes(level: Level) -> bool:
        return level.attainment >= share and not level.client_bound and (not plan.open or level.keeps_up)

    def unsure(level: Level) -> bool:
        low, high = level.attainment_interval
        return low < share < high

    return Question(passes, unsure)


def borders(levels: Sequence[Level], passes: Callable[[Level], bool]) -> tuple[Level | None, Level | None]:
    """Return the lowest load for which the answer is no, and the highest of those below it; None: there is none."""
    passing = None
    for level in levels:
        if not passes(level):
            return passing, level
        passing = level
    return passing, None


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of the throughput-latency curve."""

    load: float
    """Sessions per second, or at a time."""
    requests_per_second: float
    output_tokens_per_second: float
    below: float | None
    """Open loop: the highest load that the server kept up with, of those that are no more than it ever answered."""
    above: float | None
    """Open loop: the lowest that it did not keep up with."""


@dataclass(frozen=True, slots=True)
class Usable:
    """The highest load that keeps the limits."""

    load: float
    goodput: float
    """Requests per second."""
    attainment: float
    """Share of the requests that kept every limit."""
    broken_at: float | None
    """The lowest load at which the server broke them; None: none that was tried."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a sweep has found."""

    knee: Knee | None
    usable: Usable | None
    notes: tuple[str, ...]
    """Why something was not found, or what holds it back."""


def find(plan: SweepPlan, levels: Sequence[Level]) -> Findings:
    """Return what the measured levels say; a sweep that was interrupted may have found less."""
    notes = []
    if bound := [level.load for level in levels if level.client_bound]:
        notes.append(
            f"The client was the bottleneck at a load of {min(bound):g}: it is no answer, and what lies above it was "
            f"not measured."
        )
    told = [level for level in levels if not level.client_bound]
    knee = (_open_knee if plan.open else _closed_knee)(told)
    if knee is None:
        notes.append("No knee: the highest load that was measured did not saturate the server.")
    usable = None
    if plan.share is not None:
        passing, failing = borders(told, keeping_limits(plan).passes)
        if passing is not None:
            broken_at = None if failing is None else failing.load
            usable = Usable(passing.load, passing.goodput or 0.0, passing.attainment, broken_at)
            if failing is None:
                notes.append("The limits held at every load that was measured: the highest may be higher.")
        elif failing is not None:
            notes.append("Even the lowest load that was measured did not keep the limits.")
    return Findings(knee, usable, tuple(notes))


def _open_knee(levels: list[Level]) -> Knee | None:
    _, failing = borders(levels, KEEPING_UP.passes)
    if failing is None:
        return None
    best = max(levels, key=lambda level: level.answered)
    load = min(best.answered, failing.load)
    return Knee(
        load=load,
        requests_per_second=best.answered,
        output_tokens_per_second=best.output_tokens_per_second,
        # What was answered tells more than a queue that has hardly begun to grow.
        below=max((level.load for level in levels if level.load <= load and level.load < failing.load), default=None),
        above=failing.load,
    )


def _closed_knee(levels: list[Level]) -> Knee | None:
    """Return the level with the most power; at the highest load of all it may still be on its way up."""
    best = max(levels, key=lambda level: level.power, default=None)
    if best is None or best is levels[-1] or not best.power:
        return None
    return Knee(best.load, best.answered, best.output_tokens_per_second, below=None, above=None)
