"""The page's figures: memory, throughput against latency, prices, and measured against predicted steps."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from inflight.export.plan.calibration import Comparison
from inflight.export.plan.ranking import Ranking
from inflight.export.plan.result import Plan
from inflight.export.plan.rows import memory_parts
from inflight.report.drawing import (
    BAD,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    GRID,
    INK,
    PAPER,
    PURPLE,
    WIDTH,
    YELLOW,
    legend_above,
    new_figure,
)

_COLOURS = {
    "weights": BLUE,
    "KV cache": GREEN,
    "activations": YELLOW,
    "runtime": PURPLE,
    "reserve": GREY,
    "free": GRID,
}


def memory_figure(plans: Sequence[Plan]) -> Figure:
    """Return one bar per plan: one GPU's memory, in GiB."""
    figure = new_figure(WIDTH, 1.1 + 0.5 * len(plans))
    axes = figure.add_subplot()
    for place, plan in enumerate(plans):
        left = 0.0
        for name, size in memory_parts(plan):
            width = size / 2**30
            first = name not in axes.get_legend_handles_labels()[1]
            axes.barh(place, width, left=left, color=_COLOURS[name], label=name if first else None, height=0.6)
            if width > 0.07 * plan.memory.total / 2**30 * _scale(plans, plan):
                shade = INK if name in ("activations", "free") else PAPER
                axes.text(left + width / 2, place, f"{width:.1f}", ha="center", va="center", color=shade, fontsize=9)
            left += width
    axes.set_yticks(range(len(plans)), [plan.gpu.name for plan in plans])
    axes.invert_yaxis()
    axes.set_xlabel("memory of one GPU, GiB")
    axes.grid(axis="y", visible=False)
    legend_above(axes, columns=6)
    return figure


def _scale(plans: Sequence[Plan], plan: Plan) -> float:
    """Return how much longer than this plan's the longest bar is."""
    return max(other.memory.total for other in plans) / plan.memory.total


def curve_figure(plans: Sequence[Plan]) -> Figure:
    """Return throughput against ITL and against TTFT, of one replica each, with the objectives as lines."""
    figure = new_figure(WIDTH, 3.8)
    left, right = figure.subplots(1, 2)
    request = plans[0].request
    panels = ((left, "itl_ms", "ITL, ms", request.slo_itl_ms), (right, "ttft_ms", "TTFT, ms", request.slo_ttft_ms))
    for axes, name, label, objective in panels:
        for plan, colour in zip(plans, COLOURS * len(plans), strict=False):
            across = [point.tokens_per_second for point in plan.curve]
            up = [getattr(point, name) for point in plan.curve]
            axes.plot(across, up, color=colour, marker="o", markersize=4, label=plan.gpu.name)
            if len(plans) == 1:
                _mark_batches(axes, plan, across, up)
            if plan.load is not None:
                axes.plot(plan.load.tokens_per_second, getattr(plan.load, name), "*", color=colour, markersize=13)
        if objective is not None:
            axes.axhline(objective, color=BAD, linestyle="--", linewidth=1, label="objective")
        axes.set_xlabel("tokens/s of one replica")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
        axes.legend()
    return figure


def _mark_batches(axes: Axes, plan: Plan, across: Sequence[float], up: Sequence[float]) -> None:
    """Write batch sizes at the points that are far enough apart to be read."""
    span, last = (max(across), max(up)), (-1.0, -1.0)
    for point, x, y in reversed(list(zip(plan.curve, across, up, strict=True))):
        place = (x / span[0], y / span[1])
        if max(abs(place[0] - last[0]), abs(place[1] - last[1])) < 0.06:
            continue
        axes.annotate(f"{point.batch:.0f}", (x, y), textcoords="offset points", xytext=(-5, 6), fontsize=8, ha="right")
        last = place


def price_figure(ranking: Ranking) -> Figure:
    """Return the price of every GPU that can serve the load."""
    plans = ranking.plans
    hourly = plans[0].request.rate is not None
    prices = [plan.fleet.usd_per_hour if hourly else plan.fleet.usd_per_million_tokens or 0.0 for plan in plans]
    figure = new_figure(WIDTH, 0.9 + 0.34 * len(plans))
    axes = figure.add_subplot()
    axes.barh(range(len(plans)), prices, color=BLUE, height=0.65)
    for place, (plan, price) in enumerate(zip(plans, prices, strict=True)):
        label = f"{price:.3g} USD, {plan.fleet.gpus} GPU{'s' * (plan.fleet.gpus != 1)}"
        axes.annotate(label, (price, place), textcoords="offset points", xytext=(5, 0), va="center", fontsize=9)
    axes.set_yticks(range(len(plans)), [plan.gpu.name for plan in plans])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.25 * max(prices) or 1)
    axes.set_xlabel("USD per hour for the whole load" if hourly else "USD per million generated tokens, fully used")
    return figure


def comparison_figure(comparisons: Sequence[Comparison]) -> Figure:
    """Return measured points on the predicted curves: decode throughput against ITL, and prompts against their time."""
    figure = new_figure(WIDTH, 3.8)
    left, right = figure.subplots(1, 2)
    decodes = [one for one in comparisons if not one.row.prompt_tokens]
    for context, colour in zip(sorted({one.row.context for one in decodes}), COLOURS, strict=False):
        rows = sorted((one for one in decodes if one.row.context == context), key=lambda one: one.row.streams)
        predicted = [1000 * one.row.streams / one.predicted_ms for one in rows]
        left.plot(predicted, [one.predicted_ms for one in rows], color=colour, label=f"predicted, context {context}")
        measured = [one.row.tokens_per_second for one in rows]
        left.plot(measured, [one.row.step_ms for one in rows], "o", color=colour, markersize=5, label="measured")
        for one, x in zip(rows, measured, strict=True):
            left.annotate(
                f"{one.row.streams}", (x, one.row.step_ms), textcoords="offset points", xytext=(-4, 5), fontsize=8,
                ha="right",
            )  # fmt: skip
    left.set_xlabel("tokens/s, all streams")
    left.set_ylabel("ITL, ms (labels: streams)")
    prompts = [one for one in comparisons if one.row.prompt_tokens]
    for streams, colour in zip(sorted({one.row.streams for one in prompts}), COLOURS, strict=False):
        rows = sorted((one for one in prompts if one.row.streams == streams), key=lambda one: one.row.prompt_tokens)
        lengths = [one.row.prompt_tokens for one in rows]
        label = f"predicted, {streams} streams beside" if streams else "predicted, alone"
        right.plot(lengths, [one.predicted_ms * one.row.prompt_steps for one in rows], color=colour, label=label)
        times = [one.row.step_ms * one.row.prompt_steps for one in rows]
        right.plot(lengths, times, "o", color=colour, markersize=5, label="measured")
    right.set_xlabel("prompt tokens")
    right.set_ylabel("prefill, ms")
    for axes in (left, right):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    return figure
