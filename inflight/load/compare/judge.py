"""Whether figures of two sides differ by more than noise, with many figures looked at. It knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Verdict = Literal["better", "worse", "no change", "too few"]
"""Changed beyond noise for the better or the worse; not told from noise; or not judged, for want of requests."""


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
