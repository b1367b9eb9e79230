"""What the panels say, in a line each: for a terminal too low for panels."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from inflight.observe.counts import Counts
from inflight.observe.drawing import CACHED, FREE, UNKNOWN, dim, gauge, number, percent, sparkline, time
from inflight.observe.history import Figures

_TWO_COLUMNS = 64
"""Width from which two of them stand side by side."""


def lines(counted: Counts, figures: Figures, width: int) -> RenderableType:
    """Return throughput, batch, cache and latency in as few lines as ``width`` columns allow."""
    columns = 2 if width >= _TWO_COLUMNS else 1
    half = width // columns - 2
    rates = f"output {number(figures.output_tokens_per_s)}, input {number(figures.input_tokens_per_s)} tokens/s"
    steps = f"{number(figures.steps_per_s)} steps/s of {time(figures.step_s)}, batch {number(figures.batch)}"
    cells = [
        Text(rates),
        Text(sparkline(figures.series, half), style="green"),
        Text(steps),
        Text(f"requests {number(figures.requests_per_s)} ended/s"),
        gauge("running", counted.running, counted.max_running, half, "green"),
        gauge("waiting", counted.waiting, counted.max_waiting, half, "magenta"),
        *_cache(counted, figures, half),
    ]
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for first in range(0, len(cells), columns):
        grid.add_row(*cells[first : first + columns])
    return Group(grid, _latency(figures, across=columns == 2))


def _cache(counted: Counts, figures: Figures, width: int) -> list[Text]:
    cache = counted.cache
    if cache is None:
        return [dim("no KV cache is told of")]
    cached = "" if cache.cached is None else f"{CACHED} {cache.cached} cached  "
    return [
        gauge("KV used", cache.used, cache.num_blocks, width, "cyan"),
        Text(f"{cached}{FREE} {cache.free} free  hits {percent(figures.hit_rate)}"),
    ]


def _latency(figures: Figures, across: bool) -> Table:
    """Return the latencies, a column each or, where they would not fit, a row each."""
    rows = [
        (f"last {figures.window_s:.0f} s" if figures.window_s else UNKNOWN, "p50", "p99"),
        *((name, time(median), time(high)) for name, (median, high) in figures.latencies.items()),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in zip(*rows, strict=True) if across else rows:
        if not table.columns:
            for index in range(len(row)):
                table.add_column(justify="right" if index else "left", no_wrap=True)
        table.add_row(*row, style="" if table.row_count else "dim")
    return table
