"""Plans in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.export.plan.calibration import Comparison
from inflight.export.plan.ranking import Ranking
from inflight.export.plan.result import Plan
from inflight.export.plan.rows import Row, comparison_rows, curve_rows, memory_parts, ranking_rows, summary

_BAR_WIDTH = 72
_COLOURS = {
    "weights": "blue",
    "KV cache": "green",
    "activations": "yellow",
    "runtime": "magenta",
    "reserve": "bright_black",
    "free": "white",
}
_FILLS = {"weights": "█", "KV cache": "▓", "activations": "▒", "runtime": "▚", "reserve": "░", "free": "·"}


def show_plan(console: Console, plan: Plan) -> None:
    """Print one plan: memory, what fits, what it does."""
    console.print(f"\n[bold]{plan.gpu.title}[/bold]  ({plan.memory.total / 2**30:.1f} GiB)")
    console.print(memory_bar(plan))
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    for name, text in summary(plan):
        facts.add_row(name, text)
    console.print(facts)
    if plan.predicted:
        console.print(_table("Steady states of one replica", curve_rows(plan)))


def memory_bar(plan: Plan) -> Text:
    """Return one GPU's memory as a bar of text, with a legend below it; every part that exists has a character."""
    parts = memory_parts(plan)
    total = sum(size for _, size in parts)
    widths = [max(1, round(_BAR_WIDTH * size / total)) for _, size in parts]
    widths[widths.index(max(widths))] += _BAR_WIDTH - sum(widths)
    bar = Text()
    for (name, _), width in zip(parts, widths, strict=True):
        bar.append(_FILLS[name] * width, style=_COLOURS[name])
    for index, (name, size) in enumerate(parts):
        bar.append("\n" if index % 3 == 0 else "   ")
        bar.append(_FILLS[name] * 2, style=_COLOURS[name])
        bar.append(f" {name} {size / 2**30:.2f} GiB")
    return bar


def show_ranking(console: Console, ranking: Ranking) -> None:
    """Print the GPUs by price, and those that cannot, with the reason."""
    if ranking.plans:
        console.print(_table("GPUs by price (assumptions of build/gpus.toml, but for --price)", ranking_rows(ranking)))
    for name, reason in ranking.refused:
        console.print(f"[dim]{name:>11}[/dim]  {reason}", highlight=False)


def show_comparison(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print measured steps beside predicted ones."""
    console.print(_table("Measured and predicted; the error is the throughput's", comparison_rows(comparisons)))


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", padding=(0, 1))
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    return table


def _text(value: object) -> str:
    return "" if value is None else (f"{value:,}" if isinstance(value, int | float) else str(value))
