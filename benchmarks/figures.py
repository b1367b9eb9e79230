"""How the pictures look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from benchmarks.result import Row
from inflight.report.drawing import WIDTH, new_figure
from inflight.report.plots import COLOURS

_HEIGHT = 3.6

Points = Mapping[float, float]
"""A curve: heights by places."""


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, side by side."""
    figure = new_figure(WIDTH, _HEIGHT)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def legend_above(axes: Axes, columns: int = 3) -> None:
    """Name what is drawn in a panel, above its right end."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=columns)


def curves(axes: Axes, lines: Mapping[str, Points], across: str, up: str, log_x: bool = False) -> None:
    """Draw a line with a name for each of ``lines``; heights from 0."""
    for (name, points), colour in zip(lines.items(), COLOURS * len(lines), strict=False):
        axes.plot(list(points), list(points.values()), marker="o", markersize=4.5, color=colour, label=name)
    if log_x:
        places = sorted({place for points in lines.values() for place in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
    axes.set_ylim(0, 1.08 * max(height for points in lines.values() for height in points.values()) or 1)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if len(lines) > 1:
        legend_above(axes)


def bars(axes: Axes, groups: Mapping[str, Mapping[str, float]], up: str) -> None:
    """Draw groups of bars: heights by bar, by group; each group has the same bars."""
    names = list(next(iter(groups.values())))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        left = [index + (place - (len(names) - 1) / 2) * width for index in range(len(groups))]
        heights = [group[name] for group in groups.values()]
        axes.bar(left, heights, 0.92 * width, color=COLOURS[place % len(COLOURS)], label=name)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(up)
    axes.grid(axis="x", visible=False)
    if len(names) > 1:
        legend_above(axes)


def stacks(axes: Axes, groups: Mapping[str, Mapping[str, float]], up: str) -> None:
    """Draw a bar for each of ``groups``, its parts one upon the other: heights by part, the same parts in each."""
    below = [0.0] * len(groups)
    for place, name in enumerate(next(iter(groups.values()))):
        heights = [parts[name] for parts in groups.values()]
        axes.bar(range(len(groups)), heights, 0.7, below, color=COLOURS[place % len(COLOURS)], label=name)
        below = [under + height for under, height in zip(below, heights, strict=True)]
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(up)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)


def level(axes: Axes, value: float, name: str, number: int = 0) -> None:
    """Draw a line across, to hold the others to; ``number``: which of several it is."""
    axes.axhline(value, color=COLOURS[1 + number], linestyle="--", linewidth=1.2, label=name)
    axes.set_ylim(top=max(axes.get_ylim()[1], 1.08 * value))
    legend_above(axes)


def streams_of(count: int) -> str:
    """Return so many streams in words."""
    return f"{count} stream{'s' * (count > 1)}"


def columns(rows: Sequence[Row], across: str, up: str, kind: str | None = None) -> Points:
    """Return two columns of a table as a curve; ``kind``: of the rows alone that have it in the column ``kind``."""
    return {float(row[across]): float(row[up]) for row in rows if kind is None or row["kind"] == kind}
