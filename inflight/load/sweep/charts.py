"""The figures of a sweep's report: latency over throughput, and what the server does with a load."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from inflight.load.sweep.knee import Findings
from inflight.load.sweep.rows import percentile
from inflight.load.sweep.search import Plan
from inflight.load.sweep.step import Level
from inflight.report.drawing import BLUE, GOOD, GREY, INK, ORANGE, PAPER, WIDTH, YELLOW, new_figure

_PERCENTILES = (("p50", BLUE), ("p95", YELLOW), ("p99", ORANGE))
_LOG_FROM = 20
"""Times that the largest value is the smallest, from which on an axis of latencies is logarithmic."""


def curve_figure(plan: Plan, levels: Sequence[Level], findings: Findings) -> Figure:
    """Return TTFT and ITL over the throughput that was reached, the loads in order."""
    figure = new_figure(WIDTH, 4.2)
    shown = [level for level in levels if not level.client_bound]
    for axes, (label, name) in zip(figure.subplots(1, 2), (("TTFT", "ttft_ms"), ("ITL", "itl_ms")), strict=True):
        for which, colour in _PERCENTILES:
            points = [(level.answered, percentile(level, name, which), level) for level in shown]
            known = [(x, y, level) for x, y, level in points if y is not None]
            axes.plot([x for x, _, _ in known], [y for _, y, _ in known], color=colour, linewidth=1.4, label=which)
            for x, y, level in known:
                stable = level.keeps_up or not plan.open
                axes.plot([x], [y], marker="o", markersize=4.5, color=colour, markerfacecolor=None if stable else PAPER)
        _latency_axis(axes)
        axes.set_ylabel(f"{label}, ms")
        axes.set_xlabel("requests/s answered")
        axes.set_xlim(left=0)
        _mark_throughputs(axes, levels, findings)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=5)
    return figure


def _latency_axis(axes: Axes) -> None:
    drawn = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()])
    values = drawn[drawn > 0].tolist()
    if values and max(values) > _LOG_FROM * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
    else:
        axes.set_ylim(bottom=0)


def _mark_throughputs(axes: Axes, levels: Sequence[Level], findings: Findings) -> None:
    if findings.knee is not None:
        axes.axvline(findings.knee.requests_per_second, color=INK, linestyle="--", linewidth=1.2, label="knee")
    if findings.usable is not None:
        [level] = [level for level in levels if level.load == findings.usable.load]
        axes.axvline(level.answered, color=GOOD, linestyle="-.", linewidth=1.2, label="keeps the limits")


def load_figure(plan: Plan, levels: Sequence[Level], findings: Findings) -> Figure:
    """Return throughput, what the knee is read from, and goodput, over the load."""
    shown = [level for level in levels if not level.client_bound]
    goodput = [(level.load, level.goodput) for level in shown if level.goodput is not None]
    figure = new_figure(WIDTH, 3.4)
    panels = figure.subplots(1, 3 if goodput else 2)
    loads = [level.load for level in shown]
    panels[0].plot(loads, [level.answered for level in shown], marker="o", markersize=4.5, color=BLUE)
    panels[0].set_ylabel("requests/s answered")
    top = max((level.answered for level in shown), default=0.0)
    for ceiling, bound in _asymptotes(plan, shown, top):
        panels[0].plot(ceiling, bound, color=GREY, linestyle=":", linewidth=1.2)
    panels[0].set_ylim(0, 1.15 * top or 1)
    values = [level.queue_growth for level in shown] if plan.open else [level.power for level in shown]
    panels[1].plot(loads, values, marker="o", markersize=4.5, color=ORANGE)
    panels[1].set_ylabel("queue growth, requests/s" if plan.open else "power, requests/s per second")
    if goodput:
        panels[2].plot(*zip(*goodput, strict=True), marker="o", markersize=4.5, color=GOOD)
        panels[2].set_ylabel("goodput, requests/s")
        panels[2].set_ylim(bottom=0)
    for axes in panels:
        axes.set_xlabel("sessions/s" if plan.open else "sessions at a time")
        _load_axis(axes, plan)
        _mark_loads(axes, findings)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2)
    return figure


def _asymptotes(plan: Plan, levels: Sequence[Level], top: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the two lines that throughput cannot be above: what comes, and the most that was reached."""
    if not levels:
        return []
    light = levels[0]
    slope = light.offered / light.load if plan.open else 1 / light.mean_e2e_s if light.mean_e2e_s else 0.0
    loads = np.geomspace(light.load, levels[-1].load)
    return [(loads, slope * loads), (loads, np.full(len(loads), top))]


def _load_axis(axes: Axes, plan: Plan) -> None:
    if plan.open:
        axes.set_xlim(left=0)
        return
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())


def _mark_loads(axes: Axes, findings: Findings) -> None:
    if findings.knee is not None:
        axes.axvline(findings.knee.load, color=INK, linestyle="--", linewidth=1.2, label="knee")
    if findings.usable is not None:
        axes.axvline(findings.usable.load, color=GOOD, linestyle="-.", linewidth=1.2, label="keeps the limits")
