"""Draws the dashboards from a running Prometheus, one SVG each: for whoever has no Grafana.

Layout and queries are those of Grafana's dashboards; what it looks like is not Grafana's.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from inflight.monitoring.boards.all import DASHBOARDS
from inflight.monitoring.draw import Window, axis_unit, draw_panel
from inflight.monitoring.health import JOB
from inflight.monitoring.panels import COLUMNS, Dashboard, Panel, Query, Row
from inflight.monitoring.prometheus import Prometheus, Series
from inflight.report.drawing import GRID, MUTED, PAPER, SHADE, new_figure, svg

_COLUMN, _UNIT, _GAP, _HEAD, _ROW = 0.5, 0.33, 0.1, 0.75, 0.42
"""Inches: a column of the grid, a unit of height, between panels, the page's heading, a row's heading."""
_POINTS = 240
"""Points of a line."""
_SCRAPES_PER_RATE = 4
"""Grafana's own choice of ``$__rate_interval``: the window of a rate has four scrapes at least."""


def expression(query: Query, interval_s: float) -> str:
    """Return a panel's expression for all servers, with windows of ``interval_s`` seconds."""
    expr = query.expr.replace("$__rate_interval", f"{round(interval_s * 1000)}ms")
    return expr.replace("$instance", ".*").replace("$model", ".*")


def render(prometheus: Prometheus, folder: Path, start: float, end: float) -> Iterator[Path]:
    """Draw every dashboard into ``folder``; yield each file once it is written.

    Args:
        prometheus: what has the data.
        folder: is made if it does not exist.
        start: first second shown, since the epoch.
        end: last second shown.

    Raises:
        PrometheusError: Prometheus cannot be asked, or scrapes no server.
    """
    scrape_s = prometheus.scrape_interval_s(JOB)
    window = Window(start, end, max(scrape_s, (end - start) / _POINTS))
    interval_s = max(_SCRAPES_PER_RATE * scrape_s, window.step_s + scrape_s)
    folder.mkdir(parents=True, exist_ok=True)
    for board in DASHBOARDS:
        path = folder / f"{board.uid}.svg"
        path.write_text(svg(_figure(board, prometheus, window, interval_s), board.title), encoding="utf-8")
        yield path


def _figure(board: Dashboard, prometheus: Prometheus, window: Window, interval_s: float) -> Figure:
    placed = [(row, list(_place(row))) for row in board.rows]
    height = _HEAD + sum(_ROW + _bottom(panels) * _UNIT for _, panels in placed)
    figure = new_figure(COLUMNS * _COLUMN, height, layout=None)
    figure.set_facecolor(SHADE)
    first, last = (datetime.fromtimestamp(at, UTC) for at in (window.start, window.end))
    _text(figure, 0.02, 0.3, board.title, size=17, weight="bold")
    _text(figure, 0.02, 0.58, f"{board.description}  {first:%Y-%m-%d %H:%M:%S} to {last:%H:%M:%S} UTC", color=MUTED)
    top = _HEAD
    for row, panels in placed:
        _text(figure, 0.02, top + 0.27, row.title, size=12, weight="bold")
        top += _ROW
        for panel, column, line in panels:
            _panel(figure, panel, column, top + line * _UNIT, _ask(prometheus, panel, window, interval_s), window)
        top += _bottom(panels) * _UNIT
    return figure


def _place(row: Row) -> Iterator[tuple[Panel, int, int]]:
    """Yield each panel of a row with its column and line, from left to right as Grafana does."""
    column = line = tallest = 0
    for panel in row.panels:
        if column + panel.width > COLUMNS:
            column, line, tallest = 0, line + tallest, 0
        yield panel, column, line
        column, tallest = column + panel.width, max(tallest, panel.height)


def _bottom(panels: list[tuple[Panel, int, int]]) -> int:
    return max(line + panel.height for panel, _, line in panels)


def _ask(prometheus: Prometheus, panel: Panel, window: Window, interval_s: float) -> list[tuple[Query, list[Series]]]:
    return [
        (query, prometheus.range(expression(query, interval_s), window.start, window.end, window.step_s))
        for query in panel.queries
    ]


def _panel(
    figure: Figure, panel: Panel, column: int, top: float, data: list[tuple[Query, list[Series]]], window: Window
) -> None:
    """Draw a panel's frame and title, and what it shows within; ``top`` is in inches from the page's top."""
    width, height = figure.get_size_inches()
    left = column * _COLUMN + _GAP / 2
    wide, high = panel.width * _COLUMN - _GAP, panel.height * _UNIT - _GAP
    frame = FancyBboxPatch(
        (left / width, 1 - (top + high) / height),
        wide / width,
        high / height,
        boxstyle="square,pad=0",
        transform=figure.transFigure,
        facecolor=PAPER,
        edgecolor=GRID,
        linewidth=0.8,
        zorder=-1,
    )
    figure.add_artist(frame)
    _text(figure, left + 0.1, top + 0.22, panel.title, size=9.5, weight="bold")
    if panel.kind == "timeseries" and (unit := axis_unit(panel.unit)):
        _text(figure, left + wide - 0.1, top + 0.22, unit, size=8, color=MUTED, ha="right")
    inner = (left, 1 - (top + high) / height, wide, high - 0.32)
    axes = figure.add_axes((inner[0] / width, inner[1], inner[2] / width, inner[3] / height))
    draw_panel(axes, panel, data, window)


def _text(figure: Figure, left: float, top: float, text: str, **style: Any) -> None:
    """Write a text at inches from the page's left and top edges."""
    width, height = figure.get_size_inches()
    figure.text(left / width, 1 - top / height, text, **({"size": 9} | style))
