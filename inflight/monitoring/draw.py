"""Draws what a panel shows, lines, number, bars, heat map or table, into axes that span the panel below its title."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox

from inflight.monitoring.panels import Panel, Query, Unit
from inflight.monitoring.prometheus import Series
from inflight.report.drawing import BAD, BLUE, COLOURS, GREY, GRID, MUTED
from inflight.report.units import duration, quantity

_SUFFIXES: dict[Unit, str] = {"reqps": "req/s", "tokens/s": "tokens/s", "ops": "/s", "short": ""}
"""Of units that one number's place in the series does not change; times and shares carry theirs with each number."""
_STAT_AREA = 0.36
"""How much of its panel the course of a number may take: the number stands above it."""
_HIDDEN = {"__name__", "job", "version", "model"}
"""Labels that a table of builds leaves out."""
_LEGEND_ENTRIES = 4

Data = list[tuple[Query, list[Series]]]


@dataclass(frozen=True)
class Window:
    """The time shown: first and last second since the epoch, and the seconds between two points."""

    start: float
    end: float
    step_s: float


def draw_panel(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    """Draw ``data`` as the panel's kind says; a panel without data says so."""
    if not any(series for _, series in data):
        axes.axis("off")
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color=GREY, transform=axes.transAxes)
        return
    _KINDS[panel.kind](axes, panel, data, window)


def format_value(value: float, unit: Unit) -> str:
    """Return a value as people read it: ``12 ms``, ``3.4 %``, ``1,204 tokens/s``."""
    if unit == "percentunit":
        return f"{quantity(value * 100)} %" if value < 10 else f"{value:,.0f} x"
    if unit == "s":
        return duration(value)
    suffix = _SUFFIXES[unit]
    return f"{quantity(value)}{' ' * suffix[:1].isalpha()}{suffix}"


def axis_unit(unit: Unit) -> str:
    """Return the unit that a panel says once, beside its title, for all the numbers of its axis."""
    return _SUFFIXES.get(unit, "")


def _lines(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    lines = _named(data)
    if panel.stacked:
        _stack(axes, lines, window)
    else:
        for index, (name, one) in enumerate(lines):
            axes.plot(_times(one.times), one.values, color=_color(index), linewidth=1.3, label=name)
    _set_inside(axes, left=0.6, bottom=0.52)
    axes.set_ylim(bottom=0)
    if panel.limit is not None:
        highest = max(max(one.values) for _, one in lines)
        # A limit far above the data would flatten it.
        if panel.limit <= 6 * highest:
            axes.axhline(panel.limit, color=BAD, linewidth=1, linestyle="--", label="limit")
            axes.set_ylim(0, 1.15 * max(panel.limit, highest))
    if axes.get_ylim()[1] <= 1e-9 or all(max(one.values) == 0 for _, one in lines):
        axes.set_ylim(0, 1)
    _style(axes, panel, window)
    _add_legend(axes, panel, lines)


def _add_legend(axes: Axes, panel: Panel, lines: list[tuple[str, Series]]) -> None:
    """Name the lines below the axes; where there are many, only those that are not zero throughout."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > _LEGEND_ENTRIES:
        shown = {name for name, one in lines if any(one.values)}
        kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name in shown]
        handles, names = [handle for handle, _ in kept], [name for _, name in kept]
    if names:
        axes.legend(
            handles,
            names,
            loc="upper left",
            bbox_to_anchor=(-0.02, -0.12),
            ncols=_LEGEND_ENTRIES if panel.width <= 8 else 2 * _LEGEND_ENTRIES,
            fontsize=8,
            handlelength=1,
            columnspacing=1,
            borderaxespad=0.2,
        )


def _stack(axes: Axes, lines: list[tuple[str, Series]], window: Window) -> None:
    """Stack the series on the union of their times; where one has no value, it has none of the height."""
    times = sorted({time for _, one in lines for time in one.times})
    rows = [[dict(zip(one.times, one.values, strict=True)).get(time, 0.0) for time in times] for _, one in lines]
    colors = [_color(index) for index in range(len(lines))]
    axes.stackplot(_times(times), rows, labels=[name for name, _ in lines], colors=colors, alpha=0.75, linewidth=0)


def _stat(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    """Write the last value of each series, side by side, each with its name where there are several."""
    lines = _named(data)
    for index, (name, one) in enumerate(lines):
        axes.fill_between(_times(one.times), one.values, color=_color(index), alpha=0.18, linewidth=0)
        place = (index + 0.5) / len(lines)
        text, size = format_value(one.values[-1], panel.unit), 15 / len(lines) ** 0.5
        axes.text(place, 0.72, text, ha="center", va="center", size=size, weight="bold", transform=axes.transAxes)
        if len(lines) > 1:
            axes.text(place, 0.48, name, ha="center", va="center", size=8, color=MUTED, transform=axes.transAxes)
    axes.set_ylim(0, (max(max(one.values) for _, one in lines) or 1) / _STAT_AREA)
    axes.axis("off")


def _bars(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    """Draw the last value of each series as a bar, the first on top."""
    lines = _named(data)
    _set_inside(axes, left=1.9, bottom=0.1)
    values = [one.values[-1] for _, one in lines]
    bars = axes.barh(range(len(lines)), values, color=BLUE, height=0.65)
    axes.bar_label(bars, [format_value(value, panel.unit) for value in values], padding=4, fontsize=8)
    axes.set_yticks(range(len(lines)), [name for name, _ in lines])
    axes.set_xlim(0, 1.15 * max(*values, 1e-9))
    axes.invert_yaxis()
    axes.tick_params(labelsize=8, length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _heat_map(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    """Draw cumulative buckets as the share of each bucket: what is below a bound less what is below the one before."""
    found = sorted(data[0][1], key=lambda one: float(one.labels["le"]))
    times = sorted({time for one in found for time in one.times})
    below = [dict(zip(one.times, one.values, strict=True)) for one in found]
    rows = [
        [max(0.0, low.get(time, 0.0) - (below[index - 1].get(time, 0.0) if index else 0.0)) for time in times]
        for index, low in enumerate(below)
    ]
    kept = _filled(rows)
    rows, bounds = rows[kept.start : kept.stop], [one.labels["le"] for one in found][kept.start : kept.stop]
    _set_inside(axes, left=0.7, bottom=0.32)
    edges = [*range(len(rows) + 1)]
    moments = [*_times(times), _times([times[-1] + window.step_s])[0]]
    axes.pcolormesh(moments, edges, rows, cmap="Oranges", vmin=0, rasterized=True)
    _style(axes, panel, window)
    axes.grid(visible=False)
    axes.set_yticks([index + 1 for index in range(len(rows))], [_bound(one) for one in bounds])


def _filled(rows: list[list[float]]) -> range:
    """Return the indices from the first bucket with anything in it to the last, with one more on either side."""
    filled = [index for index, row in enumerate(rows) if any(row)] or [0]
    return range(max(0, filled[0] - 1), min(len(rows), filled[-1] + 2))


def _bound(le: str) -> str:
    return "more" if le == "+Inf" else duration(float(le))


def _table(axes: Axes, panel: Panel, data: Data, window: Window) -> None:
    rows = [{key: value for key, value in one.labels.items() if key not in _HIDDEN} for one in data[0][1]]
    names = sorted(rows[0])
    axes.axis("off")
    cells = [[row.get(name, "") for name in names] for row in rows]
    table = axes.table(
        cells, colLabels=names, cellLoc="left", colLoc="left", bbox=Bbox.from_bounds(0.02, 0.45, 0.96, 0.5)
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8.5)
    for (row, _), cell in table.get_celld().items():
        cell.set_edgecolor(GRID)
        cell.visible_edges = "B"
        cell.set_text_props(weight="bold" if row == 0 else "normal")


def _style(axes: Axes, panel: Panel, window: Window) -> None:
    axes.set_xlim(*_times([window.start, window.end]))
    locator = AutoDateLocator(minticks=3, maxticks=7 if panel.width <= 8 else 12, tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC, show_offset=False))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    scale: Unit = "short" if axis_unit(panel.unit) else panel.unit
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, scale)))
    axes.tick_params(labelsize=8, length=0, colors=MUTED)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)


def _set_inside(axes: Axes, left: float, bottom: float) -> None:
    """Leave room, in inches, for the labels within the panel's frame."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    width, height = figure.get_size_inches()
    box = axes.get_position()
    axes.set_position((box.x0 + left / width, box.y0 + bottom / height, box.width - (left + 0.15) / width,
                       box.height - (bottom + 0.05) / height))  # fmt: skip


def _times(seconds: list[float]) -> list[Any]:
    return [datetime.fromtimestamp(one, UTC) for one in seconds]


def _color(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _named(data: Data) -> list[tuple[str, Series]]:
    """Return all series with their names; a server's name is left out where there is one and another name to tell."""
    servers = {one.labels.get("instance") for _, found in data for one in found}
    several = len(servers) > 1 or any(query.legend == "{{instance}}" for query, _ in data)
    return [(_legend(query.legend, one, several), one) for query, found in data for one in found]


def _legend(legend: str, series: Series, several: bool) -> str:
    text = legend if several else legend.replace("{{instance}}", "")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), text).strip()


_KINDS: dict[str, Callable[[Axes, Panel, Data, Window], None]] = {
    "timeseries": _lines,
    "stat": _stat,
    "bargauge": _bars,
    "heatmap": _heat_map,
    "table": _table,
}
