"""The median of a few rounds' figures, and how far it can be trusted. It knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inflight.load.compare.bootstrap import Percentiles, resample
from inflight.load.compare.compare import interval

_CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the values' median, by bootstrap; of one value, that value twice."""
    if len(values) == 1:
        return values[0], values[0]
    median = Percentiles.of((50,), np.array(values), np.arange(len(values)), len(values))
    draws = resample([median], [len(values)], np.random.default_rng(0))[0]
    return interval(np.maximum(draws, 0), _CONFIDENCE)  # widened for few rounds, which may take them below 0
