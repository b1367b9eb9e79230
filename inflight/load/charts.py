"""The report's figures: the course of a load test, and the distributions of its latencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inflight.load.arrivals import starts
from inflight.load.measurements import RequestRecord
from inflight.load.result import LoadResult
from inflight.report.drawing import BLUE, COLOURS, FRAME, GREEN, ORANGE, WIDTH, legend_above, new_figure

_MOST_POINTS = 4000
"""Of a curve or a cloud; more would only make the file larger."""


def course_figure(result: LoadResult) -> Figure:
    """Return throughput and running requests over time, with the steady window marked."""
    figure = new_figure(WIDTH, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    end = max(one.ended_s for one in result.records)
    edges = np.linspace(0, end, int(np.clip(end, 20, 120)) + 1)
    times = [arrival.time_s for one in result.records for arrival in one.arrivals]
    tokens = [arrival.tokens for one in result.records for arrival in one.arrivals]
    per_bin, _ = np.histogram(times, edges, weights=tokens)
    upper.stairs(per_bin / np.diff(edges), edges, color=BLUE, linewidth=1.5)
    upper.set_ylabel("output tokens/s")
    lower.stairs(_mean_running(result.records, edges), edges, color=ORANGE, linewidth=1.5)
    lower.set_ylabel("running requests")
    lower.set_xlabel("seconds")
    for axes in (upper, lower):
        _mark_window(axes, result)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, end)
    legend_above(upper)
    return figure


def _mean_running(records: Sequence[RequestRecord], edges: np.ndarray) -> np.ndarray:
    """Return the mean number of running requests between each two edges."""
    sent = np.array([one.sent_s for one in records])
    lasted = np.array([one.ended_s for one in records]) - sent
    until = np.array([np.clip(edge - sent, 0, lasted).sum() for edge in edges])
    return np.diff(until) / np.diff(edges)


def _mark_window(axes: Axes, result: LoadResult) -> None:
    label = "measured window" if result.steady else "ramp-up"
    axes.axvspan(*result.window, color=GREEN, alpha=0.10, linewidth=0, label=label)
    for begin in starts(result.scenario.phases)[1:-1]:
        axes.axvline(begin, color=FRAME, linestyle=":", linewidth=1)


def distribution_figure(result: LoadResult) -> Figure:
    """Return the cumulative distributions of TTFT, ITL and E2E of the window's completed requests, by class."""
    figure = new_figure(WIDTH, 3.4)
    panels: tuple[tuple[str, Callable[[RequestRecord], Sequence[float]]], ...] = (
        ("TTFT, ms", lambda one: [] if one.ttft_s is None else [one.ttft_s]),
        ("ITL per token, ms", lambda one: one.itl_s),
        ("E2E, ms", lambda one: [one.e2e_s]),
    )
    for axes, (label, of) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        for (name, records), colour in zip(_measured(result), COLOURS * 9, strict=False):
            _curve(axes, [1000 * sample for one in records for sample in of(one)], name, colour)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.02)
    figure.axes[0].set_ylabel("share of samples")
    _legend(figure.axes[0], result)
    return figure


def _curve(axes: Axes, samples: Sequence[float], name: str, colour: str) -> None:
    """Draw an empirical distribution function, thinned where it has very many samples."""
    if not samples:
        return
    across = np.sort(samples)
    up = np.arange(1, len(across) + 1) / len(across)
    keep = _spread(len(across))
    axes.step(across[keep], up[keep], where="post", color=colour, label=name, linewidth=1.5)


def latency_figure(result: LoadResult) -> Figure:
    """Return TTFT and E2E of each completed request at the time of its start, also outside of the window."""
    figure = new_figure(WIDTH, 4.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for (name, records), colour in zip(_by_class(result), COLOURS * 9, strict=False):
        done = [one for one in records if one.outcome == "completed" and one.ttft_s is not None]
        done = [done[place] for place in _spread(len(done))]
        start = [one.start_s for one in done]
        style = {"linestyle": "", "marker": ".", "markersize": 4, "color": colour, "alpha": 0.7}
        upper.plot(start, [1000 * (one.ttft_s or 0) for one in done], label=name, **style)
        lower.plot(start, [1000 * one.e2e_s for one in done], **style)
    upper.set_ylabel("TTFT, ms")
    lower.set_ylabel("E2E, ms")
    lower.set_xlabel("seconds: start of the request")
    for axes in (upper, lower):
        _mark_window(axes, result)
        axes.set_ylim(bottom=0)
        axes.set_xlim(0, max(result.load_ended_s, result.window[1]))
    _legend(upper, result)
    return figure


def _by_class(result: LoadResult) -> list[tuple[str, list[RequestRecord]]]:
    return [(name, [one for one in result.records if one.class_name == name]) for name in result.slo_of]


def _measured(result: LoadResult) -> list[tuple[str, list[RequestRecord]]]:
    """Return by class the requests whose latencies count."""
    begin, end = result.window
    return [
        (name, [one for one in records if one.outcome == "completed" and begin <= one.start_s < end])
        for name, records in _by_class(result)
    ]


def _legend(axes: Axes, result: LoadResult) -> None:
    if len(result.slo_of) > 1:
        legend_above(axes)


def _spread(count: int) -> np.ndarray:
    """Return places, evenly spread, the first and the last among them: all of them unless there are very many."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(int)) if count else np.empty(0, int)
