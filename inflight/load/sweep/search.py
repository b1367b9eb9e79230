"""Which loads a sweep tries: up until the server is saturated, then closer and closer to what is asked for.

It calls a function that measures one load, and knows nothing of servers and requests.
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
class Plan:
    """What a sweep is to find, and how closely."""

    open: bool
    """Whether loads are sessions per second; else sessions at a time."""
    low: float
    high: float
    """The lowest and the highest load to try."""
    factor: float = 2.0
    """From one load of the way up to the next."""
    tolerance: float = 0.05
    """The two loads that an answer lies between differ by no more, as a share; neighbouring numbers of sessions may."""
    share: float | None = None
    """Of the requests that must keep every limit; None: there are no limits to keep."""
    repeats: int = 3
    """How often a load is measured at most, where noise decides."""


class Search:
    """One sweep. ``levels`` has what was measured, also when ``run`` was interrupted."""

    def __init__(self, plan: Plan, measure: Callable[[float, int], Step]) -> None:
        """
        Args:
            plan: what to find.
            measure: runs one step at a load; the second argument counts its repeats, from 0.
        """
        self.plan = plan
        self._measure = measure
        self._tried: dict[float, list[Step]] = {}

    @property
    def levels(self) -> list[Level]:
        """What was measured, by load."""
        return [Level(load, tuple(steps)) for load, steps in sorted(self._tried.items())]

    def run(self) -> None:
        """Measure until everything is found that can be."""
        self._go_up()
        if self.plan.open:
            self._close_in(keeping_up())
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
                if not self._limits_hold(level) or past_knee > STEPS_PAST_KNEE:
                    return
            load = min(self._higher(load), self.plan.high)

    def _limits_hold(self, level: Level) -> bool:
        return self.plan.share is not None and keeping_limits(self.plan).passes(level)

    def _higher(self, load: float) -> float:
        higher = self._whole(load * self.plan.factor)
        return higher if self.plan.open else max(higher, load + 1)

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


def keeping_up() -> Question:
    """Return the question whether the server, and not the client, keeps up with an open loop."""
    return Question(lambda level: level.keeps_up and not level.client_bound, lambda level: level.keeping_up_is_unsure)


def keeping_limits(plan: Plan) -> Question:
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
