"""The bootstrap: how far a figure would move if the test were run again, seen from the one run that there is.

What is drawn again is a cluster: a request with all its tokens, several neighbouring requests, or a stretch of time.
What belongs together stays together, as tokens of a request, and requests that met the same queue, are not independent
(B. Efron, Annals of Statistics 7, 1979; blocks: E. Carlstein, Annals of Statistics 14, 1986). It knows arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
"""The usual number: the ends of a 95 % interval are off by some hundredths of its width; p-values reach 0.0002."""
MANY_RUNS = 3
"""From so many runs of a side on, runs are drawn too, and how runs differ is in the interval."""
_BINS = 1024
"""More different values than that are joined, a thousandth of the samples at a time."""
_Z = 1.96
_CHUNK = 500
_CLUSTERS_AT_LEAST = 20


@dataclass(frozen=True)
class Ratio:
    """A sum over a sum: a mean, a rate or a share."""

    above: np.ndarray
    below: np.ndarray
    """Both are of shape [clusters]."""

    def values(self, weights: np.ndarray) -> np.ndarray:
        """Return one value per row of ``weights`` [resamples, clusters], as [1, resamples]."""
        below = weights @ self.below
        return np.divide(weights @ self.above, below, out=np.full(len(below), np.nan), where=below > 0)[None]


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of samples that are pooled over the clusters."""

    ranks: tuple[float, ...]
    """The percentiles' ranks, in percent."""
    levels: np.ndarray
    """The samples' different values, rising: [bins]."""
    counts: np.ndarray
    """How many samples of each a cluster has: [clusters, bins]."""

    @classmethod
    def of(cls, ranks: Sequence[float], samples: np.ndarray, cluster_of: np.ndarray, clusters: int) -> Percentiles:
        """Return the percentiles of ``samples``, of which each belongs to the cluster of that number."""
        levels, place = np.unique(samples, return_inverse=True)
        if len(levels) > _BINS:
            edges = np.unique(np.quantile(samples, np.linspace(0, 1, _BINS + 1)[1:-1]))
            place = np.unique(np.searchsorted(edges, samples), return_inverse=True)[1]
            levels = np.bincount(place, samples) / np.bincount(place)
        flat = np.bincount(cluster_of * len(levels) + place, minlength=clusters * len(levels))
        return cls(tuple(ranks), levels, flat.reshape(clusters, len(levels)).astype(np.float32))

    def values(self, weights: np.ndarray) -> np.ndarray:
        """Return [ranks, resamples]: numpy's percentiles of the samples, each as often as its cluster was drawn."""
        upto = np.cumsum(weights.astype(np.float32) @ self.counts, axis=1, dtype=np.float64)
        total = upto[:, -1]
        # One search for all rows: each is lifted above the one before it.
        lift = np.arange(len(upto)) * (total.max() + 1)
        flat = (upto + lift[:, None]).ravel()
        return np.array([self._at(flat, lift, np.maximum(total - 1, 0) * rank / 100) for rank in self.ranks])

    def _at(self, flat: np.ndarray, lift: np.ndarray, position: np.ndarray) -> np.ndarray:
        begin = np.arange(len(lift)) * len(self.levels)
        lower, upper = (
            self.levels[np.minimum(np.searchsorted(flat, place + lift, "right") - begin, len(self.levels) - 1)]
            for place in (np.floor(position), np.ceil(position))
        )
        return lower + (upper - lower) * (position - np.floor(position))


Statistic = Ratio | Percentiles


def resample(
    statistics: Sequence[Statistic], runs: Sequence[int], generator: np.random.Generator, count: int = RESAMPLES
) -> np.ndarray:
    """Return the values of all statistics in ``count`` resamples, as [values, count].

    Deviations are widened for few clusters (or few runs, where they are drawn): their spread is too small by the factor
    sqrt((k - 1) / k), and a normal distribution's tails are thinner than Student's by 1 + (z**2 + 1) / (4 * (k - 1)),
    to first order.

    Args:
        statistics: all over the same clusters.
        runs: number of clusters of each run, one after the other.
    """
    parts = []
    for begin in range(0, count, _CHUNK):
        weights = draw(runs, min(_CHUNK, count - begin), generator)
        parts.append(np.concatenate([one.values(weights) for one in statistics]))
    drawn, here = np.concatenate(parts, axis=1), estimate(statistics, sum(runs))
    others = (len(runs) if len(runs) >= MANY_RUNS else sum(runs)) - 1
    widening = math.sqrt((others + 1) / others) * (1 + (_Z**2 + 1) / (4 * others)) if others else math.inf
    return here[:, None] + widening * (drawn - here[:, None])


def estimate(statistics: Sequence[Statistic], clusters: int) -> np.ndarray:
    """Return the values of all statistics as they were measured."""
    return np.concatenate([one.values(np.ones((1, clusters))) for one in statistics])[:, 0]


def draw(runs: Sequence[int], count: int, generator: np.random.Generator) -> np.ndarray:
    """Return how often each cluster is drawn in each of ``count`` resamples: [count, clusters].

    Each run's clusters are drawn from that run; of ``MANY_RUNS`` or more, the runs themselves are drawn before.
    """
    if len(runs) < MANY_RUNS:
        return np.concatenate([_draw_one(size, count, generator) for size in runs], axis=1)
    weights = np.zeros((count, sum(runs)))
    begins = np.cumsum([0, *runs])
    for _ in runs:
        chosen = generator.integers(len(runs), size=count)
        for number, size in enumerate(runs):
            rows = np.flatnonzero(chosen == number)
            weights[rows, begins[number] : begins[number + 1]] += _draw_one(size, len(rows), generator)
    return weights


def _draw_one(size: int, count: int, generator: np.random.Generator) -> np.ndarray:
    places = generator.integers(size, size=(count, size)) + np.arange(count)[:, None] * size
    return np.bincount(places.ravel(), minlength=count * size).reshape(count, size).astype(float)


def block_length(series: Sequence[float]) -> int:
    """Return how many neighbours of a series are to be drawn together; 1: they are independent.

    It is three times the series' integrated autocorrelation time, 1 + 2 * sum of the autocorrelations up to the first
    that cannot be told from none (below 1.96 / sqrt(n)), but leaves 20 blocks.
    """
    values = np.asarray(series, dtype=float) - np.mean(series) if len(series) else np.empty(0)
    count, power = len(values), float(values @ values)
    longest = count // _CLUSTERS_AT_LEAST
    if longest < 2 or power == 0:
        return 1
    time = 1.0
    for lag in range(1, count):
        correlation = float(values[:-lag] @ values[lag:]) / power
        if correlation < _Z / math.sqrt(count):
            break
        time += 2 * correlation
    return 1 if time == 1 else min(math.ceil(3 * time), longest)
