"""Two sides, figure by figure: how much they differ, how sure that is, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from inflight.load.compare.bootstrap import RESAMPLES, estimate, resample
from inflight.load.compare.samples import Group, Quantity, Run, groups_of
from inflight.load.result import ResultError

Verdict = Literal["better", "worse", "no change", "too few"]
"""Changed beyond noise for the better or the worse; not told from noise; or not judged, for want of requests."""
_SEED = 0
"""The seed of the resampling: the same results are compared the same way every time."""


class CompareError(ResultError):
    """Results that are not to be compared; the message is one line."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of both sides."""

    name: str
    unit: str
    before: float
    before_interval: tuple[float, float]
    after: float
    after_interval: tuple[float, float]
    change: float
    """After less before, in ``unit``."""
    change_interval: tuple[float, float]
    p: float | None
    """Adjusted for the number of figures; None: not judged."""
    verdict: Verdict

    @property
    def percent(self) -> float | None:
        """``change`` in percent of before; None: before is 0, or it is a percentage itself."""
        return None if self.unit == "%" or not self.before else 100 * self.change / self.before

    @property
    def percent_interval(self) -> tuple[float, float] | None:
        """``change_interval`` likewise."""
        if self.percent is None:
            return None
        low, high = (100 * end / self.before for end in self.change_interval)
        return low, high

    def as_json(self) -> dict[str, object]:
        """Return a JSON object."""
        return asdict(self) | {"percent": self.percent, "percent_interval": self.percent_interval}


@dataclass(frozen=True)
class _Figure:
    """One figure of one side: as measured, and in each resample."""

    quantity: Quantity
    value: float
    draws: np.ndarray
    """It has the shape [resamples]."""


def compare(
    before: Sequence[Run],
    after: Sequence[Run],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    tell: Callable[[str], object] = lambda _line: None,
) -> list[Row]:
    """Return a row for each figure that the runs of both sides have.

    Args:
        confidence: of each interval; and 1 less the chance that any figure is called changed that is not.
        resamples: how often each side is drawn again.
        tell: is told what is being done.

    Raises:
        CompareError: so few resamples could not show that anything has changed.
    """
    generator = np.random.default_rng(_SEED)
    pairs: list[tuple[_Figure, _Figure]] = []
    groups = list(zip(groups_of(before), groups_of(after), strict=True))
    figures = sum(len(ours.quantities) for ours, _ in groups)
    # The smallest p-value there is, 2 / (resamples + 1), times the number of figures must be below the level.
    if resamples < (needed := math.ceil(2 * figures / (1 - confidence))):
        raise CompareError(
            f"{resamples:,} resamples cannot show a change of {figures} figures at a confidence of {confidence:g}: at "
            f"least {needed:,} are needed"
        )
    for ours, theirs in groups:
        tell(f"resampling {sum(ours.clusters):,} and {sum(theirs.clusters):,} clusters {resamples:,} times")
        mine, others = _figures(ours, generator, resamples), _figures(theirs, generator, resamples)
        for pair in ((one, others[name]) for name, one in mine.items() if name in others):
            if all(np.isfinite(one.value) and np.isfinite(one.draws).all() for one in pair):
                pairs.append(pair)
            else:  # a share of nothing (0 / 0, in a resample too) is no number
                tell(f"{pair[0].quantity.name} is left out: too few requests have one")
    judged = [pair for pair in pairs if all(one.quantity.enough for one in pair)]
    adjusted = holm([p_value(other.draws - one.draws) for one, other in judged])
    p_of = {one.quantity.name: p for (one, _), p in zip(judged, adjusted, strict=True)}
    return [_row(one, other, p_of.get(one.quantity.name), confidence) for one, other in pairs]


def _figures(group: Group, generator: np.random.Generator, count: int) -> dict[str, _Figure]:
    """Return one side's figures by their names."""
    values = estimate(group.statistics, sum(group.clusters)).tolist()
    draws = resample(group.statistics, group.clusters, generator, count)
    return {one.name: _Figure(one, *both) for one, *both in zip(group.quantities, values, draws, strict=True)}


def _row(before: _Figure, after: _Figure, p: float | None, confidence: float) -> Row:
    quantity, change = before.quantity, after.value - before.value
    return Row(
        name=quantity.name,
        unit=quantity.unit,
        before=before.value,
        before_interval=interval(np.maximum(before.draws, 0), confidence),
        after=after.value,
        after_interval=interval(np.maximum(after.draws, 0), confidence),
        change=change,
        change_interval=interval(after.draws - before.draws, confidence),
        p=p,
        verdict="too few" if p is None else judge(change, quantity.higher_is_better, p, confidence),
    )


def interval(draws: np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the percentile interval of resampled values."""
    low, high = np.percentile(draws, (50 * (1 - confidence), 50 * (1 + confidence)))
    return float(low), float(high)


def p_value(differences: np.ndarray) -> float:
    """Return the two-sided p-value of "there is no difference": how seldom resampled differences are on the other side
    of 0, each side counted with one more, as no resampling proves an impossibility (A. C. Davison, D. V. Hinkley,
    Bootstrap Methods and their Application, 1997, section 4.2)."""
    count = len(differences)
    below, above = (int(np.sum(side)) for side in (differences <= 0, differences >= 0))
    return min(1.0, 2 * (min(below, above) + 1) / (count + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted so that, over all of them, the chance of any false alarm is the level of one
    (S. Holm, Scandinavian Journal of Statistics 6, 1979)."""
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def judge(change: float, higher_is_better: bool, adjusted_p: float, confidence: float) -> Verdict:
    """Return what a change is."""
    if adjusted_p > 1 - confidence or change == 0:
        return "no change"
    return "better" if (change > 0) == higher_is_better else "worse"
