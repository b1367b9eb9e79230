"""The figures that are compared, and what each is resampled from.

Latencies and shares: clusters of requests that started in the measured window, in the order of their start; so many
neighbours together as their latencies are correlated over (``block_length``), a request alone where they are not.
Rates: stretches of time of the window, at least ten, each twice as long as a mean request if there are more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from inflight.load.compare.bootstrap import Percentiles, Ratio, Statistic, block_length
from inflight.load.measurements import LATENCIES, RequestRecord, output_events
from inflight.load.scenario import Slo

RANKS = (50.0, 95.0, 99.0)
_FEWEST_BLOCKS, _MOST_BLOCKS = 10, 50
_FEWEST_BEYOND = 5
"""Requests at or above a percentile, for it to be judged: with fewer it is hardly more than the largest of them."""
_FEWEST_REQUESTS = 20
_COMPARED = {"TTFT": "ttft_ms", "ITL": "itl_ms", "E2E": "e2e_ms", "queue": "queue_ms"}
"""The latencies that are compared, by the names under which they are shown."""


@dataclass(frozen=True)
class Run:
    """One load test, as far as it is compared."""

    records: Sequence[RequestRecord]
    window: tuple[float, float]
    slo_of: Mapping[str, Slo]
    """Limits by class name, of every class that the records have."""

    @property
    def started(self) -> list[RequestRecord]:
        """The requests that started in the window, in the order of their start."""
        begin, end = self.window
        return sorted((one for one in self.records if begin <= one.start_s < end), key=lambda one: one.start_s)


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure."""

    name: str
    unit: str
    higher_is_better: bool
    enough: bool
    """Whether there are enough requests to judge it by."""


@dataclass(frozen=True)
class Group:
    """Figures over the same clusters."""

    clusters: tuple[int, ...]
    """How many clusters each run has."""
    quantities: tuple[Quantity, ...]
    """One per value of the statistics, in their order."""
    statistics: tuple[Statistic, ...]


def groups_of(runs: Sequence[Run]) -> list[Group]:
    """Return the figures of one side: rates, then what requests have."""
    return [_rates(runs), _requests(runs)]


def _rates(runs: Sequence[Run]) -> Group:
    blocks = [_edges(run) for run in runs]
    seconds = np.concatenate([np.diff(edges) for edges in blocks])

    def rate(events: Callable[[Run], Sequence[tuple[float, float]]]) -> Ratio:
        counts = []
        for run, edges in zip(runs, blocks, strict=True):
            times, weights = np.array(events(run) or [(-1.0, 0.0)], dtype=float).T
            inside = times < edges[-1]  # numpy's last bin has its end, the window has not
            counts.append(np.histogram(times[inside], edges, weights=weights[inside])[0])
        return Ratio(np.concatenate(counts), seconds)

    named: list[tuple[str, str, Ratio]] = [
        ("throughput", "requests/s", rate(lambda run: [(one.ended_s, 1) for one in run.records if one.completed])),
        ("output", "tokens/s", rate(lambda run: list(output_events(run.records)))),
    ]
    if _has_limits(runs):
        good = rate(lambda run: [(one.start_s, 1) for one in run.records if one.meets(run.slo_of[one.class_name])])
        named.append(("goodput", "requests/s", good))
    quantities = tuple(Quantity(name, unit, True, True) for name, unit, _ in named)
    return Group(tuple(len(edges) - 1 for edges in blocks), quantities, tuple(ratio for *_, ratio in named))


def _edges(run: Run) -> np.ndarray:
    """Return the ends of a window's stretches of time, in seconds."""
    lengths = [one.e2e_s for one in run.records if one.completed]
    usual = 2 * float(np.mean(lengths)) if lengths else 0.0
    begin, end = run.window
    fitting = int((end - begin) / usual) if usual > 0 else _MOST_BLOCKS
    return np.linspace(begin, end, int(np.clip(fitting, _FEWEST_BLOCKS, _MOST_BLOCKS)) + 1)


def _requests(runs: Sequence[Run]) -> Group:
    """Return shares of the requests, and mean and percentiles of each latency that has samples, in milliseconds."""
    started = [run.started for run in runs]
    clusters, cluster_of = _clusters(started)
    records = [one for run in started for one in run]
    total = sum(clusters)

    def share(quality: Sequence[bool], among: Sequence[bool]) -> Ratio:
        """Return the percentage of those ``among`` the records that have a quality."""
        above = np.bincount(cluster_of, 100.0 * (np.array(quality) & np.array(among)), minlength=total)
        return Ratio(above, np.bincount(cluster_of, np.array(among, dtype=float), minlength=total))

    quantities: list[Quantity] = []
    statistics: list[Statistic] = []
    if _has_limits(runs):
        limited = [(one, run.slo_of[one.class_name]) for run, ones in zip(runs, started, strict=True) for one in ones]
        quantities.append(Quantity("within limits", "%", True, len(records) >= _FEWEST_REQUESTS))
        statistics.append(share([one.meets(slo) for one, slo in limited], [one.is_judged(slo) for one, slo in limited]))
    for name, outcomes in (("refused", ("refused",)), ("failed", ("failed", "unfinished"))):
        quantities.append(Quantity(name, "%", False, len(records) >= _FEWEST_REQUESTS))
        statistics.append(share([one.outcome in outcomes for one in records], [True] * len(records)))
    for name, latency in _COMPARED.items():
        per_request = [LATENCIES[latency](one) if one.completed else [] for one in records]
        samples = 1000 * np.array([sample for samples in per_request for sample in samples])
        if not len(samples):
            continue
        having = sum(bool(one) for one in per_request)
        quantities.append(Quantity(f"{name} mean", "ms", False, having >= _FEWEST_REQUESTS))
        for rank in RANKS:
            enough = having >= _FEWEST_REQUESTS and having * (1 - rank / 100) >= _FEWEST_BEYOND
            quantities.append(Quantity(f"{name} p{rank:g}", "ms", False, enough))
        place = np.repeat(cluster_of, [len(one) for one in per_request])
        numbers = np.bincount(place, minlength=total).astype(float)
        statistics.append(Ratio(np.bincount(place, samples, minlength=total), numbers))
        statistics.append(Percentiles.of(RANKS, samples, place, total))
    return Group(clusters, tuple(quantities), tuple(statistics))


def _clusters(started: Sequence[Sequence[RequestRecord]]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the number of clusters of each run, and the cluster of each request, counted over the runs."""
    sizes: list[int] = []
    places: list[np.ndarray] = []
    for records in started:
        done = [one for one in records if one.completed]
        series = ([one.e2e_s for one in done], [one.ttft_s for one in done if one.ttft_s is not None])
        length = max(block_length(values) for values in series)
        places.append(sum(sizes) + np.arange(len(records)) // length)
        sizes.append(-(-len(records) // length))
    return tuple(sizes), np.concatenate(places).astype(int)


def _has_limits(runs: Sequence[Run]) -> bool:
    return any(slo != Slo() for run in runs for slo in run.slo_of.values())
