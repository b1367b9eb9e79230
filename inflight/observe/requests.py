"""The table of requests: as many columns as the terminal has room for, each of them whole."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table

from inflight.engine.snapshot import RequestState, Snapshot
from inflight.observe.drawing import dim, number, time

_ID = "request"
_MIN_ID_WIDTH, _GAP = 8, 2
_COLUMNS: dict[str, Callable[[RequestState], str]] = {
    _ID: lambda one: one.request_id or "(no id)",
    "state": lambda one: one.state,
    "prompt": lambda one: str(one.prompt_tokens),
    "cached": lambda one: str(one.cached_tokens),
    "generated": lambda one: f"{one.generated_tokens}/{one.max_tokens}",
    "tokens/s": lambda one: number(one.tokens_per_second),
    "queued": lambda one: time(one.queue_s),
    "age": lambda one: time(one.age_s),
    "priority": lambda one: str(one.priority),
    "preempted": lambda one: str(one.preemptions),
}
_DROPPED = ("preempted", "priority", "cached", "queued", "prompt", "tokens/s", "age", "generated")
"""What a narrow terminal goes without, the first of them first."""


def requests_table(snapshot: Snapshot, rows: int, width: int) -> RenderableType:
    """Return the first ``rows`` requests, and how many more there are, for ``width`` columns."""
    shown = snapshot.requests[:rows]
    cells = {name: [told(request) for request in shown] for name, told in _COLUMNS.items()}
    widths = _kept({name: max(map(len, (name, *column))) for name, column in cells.items()}, width)
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for name, wide in widths.items():
        left = name in (_ID, "state")
        table.add_column(name, justify="left" if left else "right", width=wide, no_wrap=True, overflow="ellipsis")
    for row in zip(*(cells[name] for name in widths), strict=True):
        table.add_row(*row)
    left_out = snapshot.running + snapshot.waiting - len(shown)
    return Group(table, dim(f"and {left_out} more")) if left_out else table


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
