"""How every plot looks: its type, its frame and its colours, on a light page and on a dark one.

It knows nothing of what the plots show.
"""

from __future__ import annotations

import io
import itertools
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import LogFormatter, MaxNLocator

from inflight.report import plots

WIDTH = 9.5
"""The width in inches of a figure that fills a page."""
_MARK_SIZES = {".": 4.0, "*": 13.0}
_MOST_POINTS = 4000
"""The most points of a series, evenly spread over it; more would only make the file larger."""
_LOG_FROM = 20
"""How many times the smallest value the largest is from which on an axis is logarithmic."""
_LABEL_DISTANCE = 0.06
"""The least distance between two points that both have a label, as a share of the largest values."""
_MOST_INTERVALS, _GAP = 7, 6.0
"""Intervals of an x-axis whose numbers would touch otherwise, and the pixels that lie between two numbers."""
_STYLE = {
    "figure.facecolor": plots.PAPER,
    "axes.facecolor": plots.PAPER,
    "savefig.facecolor": "auto",
    "text.color": plots.INK,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the second is as wide as the first
    "axes.labelcolor": plots.MUTED,
    "axes.edgecolor": plots.FRAME,
    "axes.titlecolor": plots.INK,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": plots.GRID,
    "grid.linewidth": 0.8,
    "xtick.color": plots.FRAME,
    "ytick.color": plots.FRAME,
    "xtick.labelcolor": plots.MUTED,
    "ytick.labelcolor": plots.MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.prop_cycle": cycler(color=plots.COLOURS),
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "inflight",  # equal figures give equal files
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of so many inches; what is drawn in this process from now on has the style."""
    matplotlib.rcParams.update(_STYLE)
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, title: str) -> str:
    """Return a figure of ``new_figure`` as an SVG element that follows the reader's preference for a light or a dark
    page; ``title`` says what it shows to those who cannot see it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    head, inside = text[text.index("<svg") :].split(">", 1)
    rules = ""
    for light, dark in plots.ON_DARK.items():
        filled = ":not(text)" if light == plots.PAPER else ""  # white text on a bar stays white
        rules += f'{filled}[style*="fill: {light}"]{{fill:{dark}!important}}'
        rules += f'[style*="stroke: {light}"]{{stroke:{dark}!important}}'
    sheet = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return f'{head} role="img">\n <title>{escape(title)}</title>\n {sheet}{inside}'


def draw(plot: plots.Plot) -> Figure:
    """Return the picture of a plot, with one legend above all of its panels."""
    figure = _draw_bars(plot) if isinstance(plot, plots.Bars) else _draw_panels(plot)
    entries: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    if entries:
        figure.legend(list(entries.values()), list(entries), loc="outside upper right", ncols=6)
    _keep_numbers_apart(figure)
    return figure


def _keep_numbers_apart(figure: Figure) -> None:
    """Lower the count of the numbers below each x-axis until none touches the next one."""
    for most in range(_MOST_INTERVALS, 1, -1):
        figure.draw_without_rendering()
        crowded = [axes for axes in figure.axes if axes.get_xscale() == "linear" and _numbers_touch(axes)]
        if not crowded:
            return
        for axes in crowded:
            axes.locator_params(axis="x", nbins=most)


def _numbers_touch(axes: Axes) -> bool:
    low, high = sorted(axes.get_xlim())
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=False)  # shared axes have no labels
    boxes = [label.get_window_extent() for place, label in ticks if low <= place <= high and label.get_text()]
    return any(left.x1 + _GAP > right.x0 for left, right in itertools.pairwise(sorted(boxes, key=lambda box: box.x0)))


def _draw_panels(plot: plots.Panels) -> Figure:
    figure, count = new_figure(WIDTH, plot.height), len(plot.panels)
    rows, columns = (count, 1) if plot.stacked else (1, count)
    grid = figure.subplots(rows, columns, sharex=plot.stacked, squeeze=False).flat
    for axes, panel in zip(grid, plot.panels, strict=True):
        _draw_panel(axes, panel)
        if plot.stacked:
            axes.label_outer()
    return figure


def _draw_panel(axes: Axes, panel: plots.Panel) -> None:
    for line in panel.lines:
        _draw_line(axes, line)
    for mark in panel.marks:
        across = axes.axvline if mark.axis == "x" else axes.axhline
        across(mark.at, color=mark.colour, linestyle=mark.style, linewidth=1.2, label=mark.name or None)
    if panel.shaded is not None:
        begin, end, name = panel.shaded
        axes.axvspan(begin, end, color=plots.GREEN, alpha=0.10, linewidth=0, label=name)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_xlim(*panel.x_limits)
    heights = [y for line in panel.lines for y in line.y if y > 0]
    if panel.log_y and heights and max(heights) > _LOG_FROM * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    else:
        axes.set_ylim(*panel.y_limits)
    if panel.y_names:
        axes.set_yticks(range(len(panel.y_names)), panel.y_names)
        axes.set_ylim(len(panel.y_names) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)


def _draw_line(axes: Axes, line: plots.Line) -> None:
    name = line.name or None
    if line.shape == "bars":
        axes.bar(line.x, line.y, color=line.colour, label=name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", visible=False)
        return
    style: dict[str, Any] = {
        "color": line.colour,
        "linestyle": {"points": "", "dotted": ":"}.get(line.shape, "-"),
        "marker": line.marker,
        "markersize": _MARK_SIZES.get(line.marker, 4.5),
        "linewidth": 1.5,
        "drawstyle": "steps-post" if line.shape == "steps" else "default",
    }
    kept = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), _MOST_POINTS)).astype(int))
    axes.plot(np.asarray(line.x)[kept], np.asarray(line.y)[kept], label=name, **style)
    for x, y, hollow in zip(line.x, line.y, line.hollow, strict=False):
        if hollow:
            axes.plot([x], [y], **style | {"markerfacecolor": plots.PAPER})
    # The last label comes first; others stand at the points that are far enough apart for them to be read.
    last_x, last_y = -1.0, -1.0
    for text, x, y in reversed(list(zip(line.labels, line.x, line.y, strict=False))):
        relative_x, relative_y = x / max(line.x), y / max(line.y)
        if max(abs(relative_x - last_x), abs(relative_y - last_y)) >= _LABEL_DISTANCE:
            axes.annotate(text, (x, y), textcoords="offset points", xytext=(-5, 6), fontsize=8, ha="right")
            last_x, last_y = relative_x, relative_y


def _draw_bars(plot: plots.Bars) -> Figure:
    figure = new_figure(WIDTH, 1.0 + 0.4 * len(plot.names))
    axes = figure.subplots()
    colours = plot.colours or dict(zip(plot.parts, plots.COLOURS, strict=False))
    ends = [0.0] * len(plot.names)
    longest = max(sum(lengths) for lengths in zip(*plot.parts.values(), strict=True))
    for part, lengths in plot.parts.items():
        label = part if len(plot.parts) > 1 else None
        bars = axes.barh(range(len(plot.names)), lengths, 0.65, ends, color=colours[part], label=label)
        if label is not None:
            dark = colours[part] not in (plots.GRID, plots.YELLOW)
            texts = [f"{length:.1f}" if length > 0.07 * longest else "" for length in lengths]
            axes.bar_label(bars, texts, label_type="center", color=plots.PAPER if dark else plots.INK, fontsize=9)
        elif plot.texts:
            axes.bar_label(bars, plot.texts, padding=5, fontsize=9)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.set_yticks(range(len(plot.names)), plot.names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, (1.25 if plot.texts else 1.02) * longest or 1)
    axes.set_xlabel(plot.label)
    return figure
