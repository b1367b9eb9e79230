"""Two sides, figure by figure: how much they differ, how sure that is, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from inflight.load.compare.bootstrap import MANY_RUNS, RESAMPLES, estimate, resample
from inflight.load.compare.judge import Verdict, holm, interval, judge, p_value
from inflight.load.compare.samples import Group, Quantity, Run, groups_of
from inflight.load.compare.sides import CompareError

_SEED = 0
"""Of the resampling: the same results are compared the same way every time."""


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
class _Pair:
    quantity: Quantity
    values: tuple[float, float]
    draws: tuple[np.ndarray, np.ndarray]


def compare(
    before: Sequence[Run],
    after: Sequence[Run],
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    tell: Callable[[str], object] = lambda _line: None,
) -> list[Row]:
    """Return a row for each figure that both sides have.

    Args:
        before: runs of one side.
        after: runs of the other.
        confidence: of each interval; and 1 less the chance that any figure is called changed that is not.
        resamples: how often each side is drawn again.
        tell: is told what is being done.

    Raises:
        CompareError: so few resamples could not show that anything has changed.
    """
    generator = np.random.default_rng(_SEED)
    pairs = []
    groups = list(zip(groups_of(before), groups_of(after), strict=True))
    _check_resamples(resamples, sum(len(ours.quantities) for ours, _ in groups), confidence)
    for ours, theirs in groups:
        tell(f"resampling {sum(ours.clusters):,} and {sum(theirs.clusters):,} clusters {resamples:,} times")
        pairs += _pairs(_drawn(ours, generator, resamples), _drawn(theirs, generator, resamples), tell)
    judged = [pair for pair in pairs if pair.quantity.enough]
    adjusted = holm([p_value(pair.draws[1] - pair.draws[0]) for pair in judged])
    p_of = {pair.quantity.name: p for pair, p in zip(judged, adjusted, strict=True)}
    return [_row(pair, p_of.get(pair.quantity.name), confidence) for pair in pairs]


def _check_resamples(resamples: int, figures: int, confidence: float) -> None:
    """Refuse what ends in "no change" whatever was measured: the smallest p-value there is, 2 / (resamples + 1), times
    the number of figures must be below the level."""
    needed = math.ceil(2 * figures / (1 - confidence))
    if resamples < needed:
        raise CompareError(
            f"{resamples:,} resamples cannot show a change of {figures} figures at a confidence of {confidence:g}: at "
            f"least {needed:,} are needed"
        )


def draws_runs(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Return whether differences between runs of a side are in the intervals."""
    return min(len(before), len(after)) >= MANY_RUNS


Drawn = dict[str, tuple[Quantity, float, np.ndarray]]


def _drawn(group: Group, generator: np.random.Generator, count: int) -> Drawn:
    values = estimate(group.statistics, sum(group.clusters))
    draws = resample(group.statistics, group.clusters, generator, count)
    rows = zip(group.quantities, values, draws, strict=True)
    return {quantity.name: (quantity, float(value), drawn) for quantity, value, drawn in rows}


def _pairs(ours: Drawn, theirs: Drawn, tell: Callable[[str], object]) -> list[_Pair]:
    """Return what both sides have; a share of nothing (0 / 0, in a resample too) is no number, and left out."""
    pairs = []
    for name in ours.keys() & theirs.keys():
        (mine, value, draws), (other, others_value, others_draws) = ours[name], theirs[name]
        if not all(np.all(np.isfinite(one)) for one in (value, draws, others_value, others_draws)):
            tell(f"{name} is left out: too few requests have one")
            continue
        both = Quantity(name, mine.unit, mine.higher_is_better, mine.enough and other.enough)
        pairs.append(_Pair(both, (value, others_value), (draws, others_draws)))
    return sorted(pairs, key=lambda pair: list(ours).index(pair.quantity.name))


def _row(pair: _Pair, p: float | None, confidence: float) -> Row:
    quantity, (before, after), (draws, others) = pair.quantity, pair.values, pair.draws
    change = after - before
    return Row(
        name=quantity.name,
        unit=quantity.unit,
        before=before,
        before_interval=interval(np.maximum(draws, 0), confidence),
        after=after,
        after_interval=interval(np.maximum(others, 0), confidence),
        change=change,
        change_interval=interval(others - draws, confidence),
        p=p,
        verdict="too few" if p is None else judge(change, quantity.higher_is_better, p, confidence),
    )
