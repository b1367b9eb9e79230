"""One frame of ``inflight top``: what a poll and the figures say, laid out for a terminal of some size.

Nothing is shown by colour alone, so that it can be read without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from inflight.engine.snapshot import CacheState, RequestState, Snapshot
from inflight.errors import InflightError, one_line
from inflight.metrics import FAMILIES
from inflight.report.units import duration, quantity
from inflight.top.history import Figures
from inflight.top.poller import Page, Poll

WIDE = 100
"""Columns from which panels stand side by side."""
_TWO_COLUMNS = 64
"""Columns from which two lines stand side by side."""
_MAP_ROWS = 6
_UNKNOWN = "–"
_USED, _MIXED, _CACHED, _FREE = "█", "▓", "▒", "·"
_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {_USED: "cyan", _MIXED: "cyan", _CACHED: "yellow", _FREE: "dim"}
_ID = "request"
_MIN_ID_WIDTH, _GAP = 8, 2
_COLUMNS: dict[str, Callable[[RequestState], str]] = {
    _ID: lambda one: one_line(one.request_id) or "(no id)",  # which a client has given
    "state": lambda one: one.state,
    "prompt": lambda one: str(one.prompt_tokens),
    "cached": lambda one: str(one.cached_tokens),
    "generated": lambda one: f"{one.generated_tokens}/{one.max_tokens}",
    "tokens/s": lambda one: _number(one.tokens_per_second),
    "queued": lambda one: _time(one.queue_s),
    "age": lambda one: _time(one.age_s),
    "priority": lambda one: str(one.priority),
    "preempted": lambda one: str(one.preemptions),
}
_DROPPED = ("preempted", "priority", "cached", "queued", "prompt", "tokens/s", "age", "generated")
"""What a narrow terminal goes without, the first of them first."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Batch, queue and cache, from the snapshot or, without it, from the metrics. None: neither tells."""

    running: float | None
    max_running: float | None
    waiting: float | None
    max_waiting: float | None
    cache: CacheState | None


def frame(
    poll: Poll, figures: Figures, notes: Sequence[str], width: int, rows: int, low: bool = False
) -> RenderableType:
    """Return the frame for a terminal of ``width`` columns, with ``rows`` requests at most.

    ``notes`` are what the user must know, such as what is missing. Where the terminal is too ``low`` for panels, lines
    say what they would.
    """
    counted = _counts(poll)
    parts: list[RenderableType] = [Text(note, style="bold yellow", no_wrap=False) for note in notes]
    parts.append(_lines(counted, figures, width) if low else _panels(counted, figures, width))
    if isinstance(poll.snapshot, Snapshot):
        parts.append(_requests_table(poll.snapshot, rows, width))
    return Group(*parts)


def missing(poll: Poll) -> list[str]:
    """Return what a poll lacks, and why."""
    notes = []
    if isinstance(poll.snapshot, InflightError):
        notes.append(f"no requests and no block map: {poll.snapshot}")
    if isinstance(poll.page, InflightError):
        notes.append(f"no rates and no latencies: {poll.page}")
    return notes


def _counts(poll: Poll) -> _Counts:
    if isinstance(poll.snapshot, Snapshot):
        shot = poll.snapshot
        return _Counts(shot.running, shot.max_batch_size, shot.waiting, shot.max_queue_size, shot.kv_cache)
    page, cache = poll.page, None
    if not isinstance(page, Page):
        return _Counts(None, None, None, None, None)
    family = FAMILIES["inflight_kv_cache_blocks"].name
    used, cached, free = (page.value(family, state=state) for state in ("used", "cached", "free"))
    if used is not None and free is not None:
        size = page.value(FAMILIES["inflight_kv_cache_block_tokens"].name) or 0
        kept = None if cached is None else int(cached)
        cache = CacheState(int(used + (cached or 0) + free), int(size), int(used), kept, int(free), stride=1, runs=())
    names = ("running_requests", "batch_size_limit", "waiting_requests", "queue_limit")
    running, max_running, waiting, limit = (page.value(FAMILIES[f"inflight_{name}"].name) for name in names)
    return _Counts(running, max_running, waiting, limit, cache)


def _panels(counted: _Counts, figures: Figures, width: int) -> RenderableType:
    inside = (width // 2 if width >= WIDE else width) - 4
    contents = {
        "throughput": _throughput(figures, inside),
        "latency": _latencies(figures, across=False),
        "batch and queue": _batch(counted, figures, inside),
        "KV cache": _cache(counted.cache, figures, inside),
    }
    panels = [Panel(one, title=title, title_align="left", border_style="dim") for title, one in contents.items()]
    if width < WIDE:
        return Group(*panels)
    return _grid(2, [Group(*panels[:2]), Group(*panels[2:])])


def _grid(columns: int, cells: Sequence[RenderableType]) -> Table:
    """Return the cells, row by row, in columns of the same width."""
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for first in range(0, len(cells), columns):
        grid.add_row(*cells[first : first + columns])
    return grid


def _throughput(figures: Figures, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("output", _number(figures.output_tokens_per_s), "tokens/s")
    table.add_row("input", _number(figures.input_tokens_per_s), "tokens/s")
    table.add_row("requests", _number(figures.requests_per_s), "ended/s")
    peak = max(figures.series, default=0.0)
    return Group(table, Text(sparkline(figures.series, width), style="green"), _dim(f"output, peak {_number(peak)}/s"))


def _batch(counted: _Counts, figures: Figures, width: int) -> RenderableType:
    steps = f"{_number(figures.steps_per_s)} steps/s of {_time(figures.step_s)}"
    return Group(
        _gauge("running", counted.running, counted.max_running, width, "green"),
        _gauge("waiting", counted.waiting, counted.max_waiting, width, "magenta"),
        Text(f"{steps}, {_number(figures.batch)} sequences each"),
    )


def _cache(cache: CacheState | None, figures: Figures, width: int) -> RenderableType:
    if cache is None:
        return _dim("this engine tells of none")
    cached = f"{_CACHED} {cache.cached} cached  " if cache.cached is not None else ""
    legend = f"{_USED} {cache.used} used  {cached}{_FREE} {cache.free} free"
    parts: list[RenderableType] = [_gauge("used", cache.used, cache.num_blocks, width, "cyan"), Text(legend)]
    if cache.runs:
        blocks = Text("\n".join(block_map(cache.map(), width, _MAP_ROWS)), no_wrap=True)
        for character, style in _STYLES.items():
            blocks.highlight_regex(f"{character}+", style)
        parts.append(blocks)
    parts.append(Text(f"prefix hits: {_percent(figures.hit_rate)} of prompt tokens; blocks of {cache.block_size}"))
    return Group(*parts)


def _lines(counted: _Counts, figures: Figures, width: int) -> RenderableType:
    """Return what the panels say in as few lines as ``width`` columns allow."""
    columns = 2 if width >= _TWO_COLUMNS else 1
    half = width // columns - 2
    rates = f"output {_number(figures.output_tokens_per_s)}, input {_number(figures.input_tokens_per_s)} tokens/s"
    steps = f"{_number(figures.steps_per_s)} steps/s of {_time(figures.step_s)}, batch {_number(figures.batch)}"
    cells = [
        Text(rates),
        Text(sparkline(figures.series, half), style="green"),
        Text(steps),
        Text(f"requests {_number(figures.requests_per_s)} ended/s"),
        _gauge("running", counted.running, counted.max_running, half, "green"),
        _gauge("waiting", counted.waiting, counted.max_waiting, half, "magenta"),
    ]
    if (cache := counted.cache) is None:
        cells.append(_dim("no KV cache is told of"))
    else:
        cached = "" if cache.cached is None else f"{_CACHED} {cache.cached} cached  "
        cells.append(_gauge("KV used", cache.used, cache.num_blocks, half, "cyan"))
        cells.append(Text(f"{cached}{_FREE} {cache.free} free  hits {_percent(figures.hit_rate)}"))
    return Group(_grid(columns, cells), _latencies(figures, across=columns == 2))


def _latencies(figures: Figures, across: bool) -> Table:
    """Return the latencies, a column each or, where they would not fit, a row each."""
    rows = [
        (f"last {figures.window_s:.0f} s" if figures.window_s else _UNKNOWN, "p50", "p99"),
        *((name, _time(median), _time(high)) for name, (median, high) in figures.latencies.items()),
    ]
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in zip(*rows, strict=True) if across else rows:
        if not table.columns:
            for index in range(len(row)):
                table.add_column(justify="right" if index else "left", no_wrap=True)
        table.add_row(*row, style="" if table.row_count else "dim")
    return table


def _requests_table(snapshot: Snapshot, rows: int, width: int) -> RenderableType:
    """Return the first ``rows`` requests, and how many more there are, for ``width`` columns."""
    shown = snapshot.requests[:rows]
    cells = {name: [told(request) for request in shown] for name, told in _COLUMNS.items()}
    widths = _kept({name: max(map(len, (name, *column))) for name, column in cells.items()}, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for name, wide in widths.items():
        left = name in (_ID, "state")
        table.add_column(name, justify="left" if left else "right", width=wide, no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[name] for name in widths), strict=True):
        table.add_row(*map(Text, row))
    left_out = snapshot.running + snapshot.waiting - len(shown)
    return Group(table, _dim(f"and {left_out} more")) if left_out else table


def _kept(widths: dict[str, int], width: int) -> dict[str, int]:
    """Return the columns that fit side by side, with their widths; the id has what the others leave."""
    kept = dict(widths)
    for name in _DROPPED:
        if _without_id(kept) + _MIN_ID_WIDTH <= width:
            break
        del kept[name]
    return kept | {_ID: min(widths[_ID], max(_MIN_ID_WIDTH, width - _without_id(kept)))}


def _without_id(widths: dict[str, int]) -> int:
    return sum(wide for name, wide in widths.items() if name != _ID) + _GAP * len(widths)


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else quantity(value)


def _time(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else duration(seconds)


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as bars, the highest of them as high as can be."""
    shown = values[-max(1, width) :]
    peak = max(shown, default=0.0)
    return "".join(_SPARKS[round(value / peak * (len(_SPARKS) - 1))] if peak else _SPARKS[0] for value in shown)


def _gauge(name: str, value: float | None, limit: float | None, width: int, style: str) -> Text:
    """Return a bar with its name before it and its numbers behind."""
    if value is None or not limit:
        return Text(f"{name:8}{_UNKNOWN}")
    numbers = f" {value:g} of {limit:g}"
    room = max(4, width - 8 - len(numbers))
    filled = min(room, round(value / limit * room)) or int(value > 0)
    return Text.assemble(f"{name:8}", ("█" * filled, style), ("·" * (room - filled), "dim"), numbers)


def block_map(states: Sequence[str], width: int, rows: int) -> list[str]:
    """Return the lines of a map of blocks; where there is no room for one each, a character stands for several."""
    group = max(1, -(-len(states) // (width * rows)))
    cells = ""
    for first in range(0, len(states), group):
        kinds = set(states[first : first + group])
        if "used" in kinds:
            cells += _USED if len(kinds) == 1 else _MIXED
        else:
            cells += _CACHED if "cached" in kinds else _FREE
    return [cells[first : first + width] for first in range(0, len(cells), width)]
