"""One frame of ``inflight top``: what a look and the figures say, laid out for a terminal of some width.

Nothing is told by colour alone, so that it can be read without.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from inflight.engine.snapshot import CacheState, Snapshot
from inflight.observe.counts import Counts, counts
from inflight.observe.drawing import (
    CACHED,
    FREE,
    USED,
    block_map,
    dim,
    gauge,
    map_text,
    number,
    percent,
    sparkline,
    time,
)
from inflight.observe.history import Figures
from inflight.observe.lines import lines
from inflight.observe.requests import requests_table
from inflight.observe.source import Look

WIDE = 100
"""Columns from which panels stand side by side."""
_MAP_ROWS = 6


def frame(
    look: Look, figures: Figures, notes: Sequence[str], width: int, rows: int, low: bool = False
) -> RenderableType:
    """Return the frame.

    Args:
        look: the newest one.
        figures: of the last seconds.
        notes: what the user must know, such as what is missing.
        width: columns of the terminal.
        rows: requests to show at most.
        low: the terminal is too low for panels; lines say what they would.
    """
    counted = counts(look)
    parts: list[RenderableType] = [Text(note, style="bold yellow", no_wrap=False) for note in notes]
    parts.append(lines(counted, figures, width) if low else _panels(counted, figures, width))
    if isinstance(look.snapshot, Snapshot):
        parts.append(requests_table(look.snapshot, rows, width))
    return Group(*parts)


def _panels(counted: Counts, figures: Figures, width: int) -> RenderableType:
    inside = (width // 2 if width >= WIDE else width) - 4
    left = Group(_panel("throughput", _throughput(figures, inside)), _panel("latency", _latency(figures)))
    right = Group(
        _panel("batch and queue", _batch(counted, figures, inside)),
        _panel("KV cache", _cache(counted.cache, figures, inside)),
    )
    if width < WIDE:
        return Group(left, right)
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _throughput(figures: Figures, width: int) -> RenderableType:
    table = _pairs()
    table.add_row("output", number(figures.output_tokens_per_s), "tokens/s")
    table.add_row("input", number(figures.input_tokens_per_s), "tokens/s")
    table.add_row("requests", number(figures.requests_per_s), "ended/s")
    peak = max(figures.series, default=0.0)
    return Group(table, Text(sparkline(figures.series, width), style="green"), dim(f"output, peak {number(peak)}/s"))


def _batch(counted: Counts, figures: Figures, width: int) -> RenderableType:
    return Group(
        gauge("running", counted.running, counted.max_running, width, "green"),
        gauge("waiting", counted.waiting, counted.max_waiting, width, "magenta"),
        Text(
            f"{number(figures.steps_per_s)} steps/s of {time(figures.step_s)}, {number(figures.batch)} sequences each"
        ),
    )


def _latency(figures: Figures) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"last {figures.window_s:.0f} s", style="dim", header_style="dim")
    table.add_column("p50", justify="right")
    table.add_column("p99", justify="right")
    for name, (median, high) in figures.latencies.items():
        table.add_row(name, time(median), time(high))
    return table


def _cache(cache: CacheState | None, figures: Figures, width: int) -> RenderableType:
    if cache is None:
        return dim("this engine tells of none")
    cached = f"{CACHED} {cache.cached} cached  " if cache.cached is not None else ""
    legend = f"{USED} {cache.used} used  {cached}{FREE} {cache.free} free"
    parts: list[RenderableType] = [gauge("used", cache.used, cache.num_blocks, width, "cyan"), Text(legend)]
    if cache.runs:
        parts.append(map_text(block_map(cache.map(), width, _MAP_ROWS)))
    parts.append(Text(f"prefix hits: {percent(figures.hit_rate)} of prompt tokens; blocks of {cache.block_size}"))
    return Group(*parts)


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    return table
