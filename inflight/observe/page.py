"""One reading of a server's Prometheus page, and what follows from the difference of two.

It knows families and samples, not what they mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from inflight.errors import EngineFailure

Buckets = dict[float, float]
"""Upper bound to the number of observations up to it; the last bound is infinite."""


class Page:
    """The samples of a page."""

    def __init__(self, text: str) -> None:
        """
        Raises:
            EngineFailure: it is not a page of metrics.
        """
        self._samples: defaultdict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        # Without the comments, names stay as they are: the parser renames counters that do not end in `_total`, and
        # Triton has the stages' histograms as counters, one for each of `_bucket`, `_sum` and `_count`.
        lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        try:
            for family in text_string_to_metric_families(lines):
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            raise EngineFailure(f"it is not a page of metrics: {error}") from None

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples of this name that have these labels; None where there are none."""
        found = [
            value for have, value in self._samples.get(name, ()) if all(have.get(k) == v for k, v in labels.items())
        ]
        return sum(found) if found else None

    def buckets(self, name: str) -> Buckets:
        """Return a histogram's cumulative counts by upper bound, over all its series; empty where there is none."""
        counts: defaultdict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            counts[float(labels["le"])] += value
        return dict(sorted(counts.items()))


def difference(new: Buckets, old: Buckets) -> Buckets:
    """Return the observations made between two readings of a histogram."""
    return {bound: count - old.get(bound, 0.0) for bound, count in new.items()}


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the value below which ``share`` of the observations lie; None where there are none.

    As Prometheus' ``histogram_quantile``: linear within a bucket, the first of which begins at 0. What lies above the
    last finite bound is told as that bound.
    """
    bounds = [(0.0, 0.0), *buckets.items()]
    rank = share * bounds[-1][1]
    if not rank:
        return None
    for (low, below), (high, upto) in pairwise(bounds):
        if upto >= rank:
            return low if math.isinf(high) else low + (high - low) * (rank - below) / (upto - below)
    return None
