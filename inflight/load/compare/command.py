"""``inflight load compare``: whether a server has changed between two load tests."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from inflight.load.compare.bootstrap import RESAMPLES
from inflight.load.compare.compare import compare as compare_runs
from inflight.load.compare.compare import draws_runs
from inflight.load.compare.report import Comparison, comparison_page, short_rows
from inflight.load.compare.sides import check_comparable, read_side
from inflight.load.result import make_directory, write_report, writing
from inflight.report.failures import one_line_errors
from inflight.report.results import print_table

COMPARISON = "comparison.json"
_console = Console(stderr=True, highlight=False)
_RESULTS = "Result directory of `inflight load run`, or a directory of several: repeats of one test."


def compare(
    before: Annotated[Path, typer.Argument(help=_RESULTS)],
    after: Annotated[Path, typer.Argument(help="Likewise.")],
    force: Annotated[bool, typer.Option("--force", help="Compare different scenarios, seeds or machines too.")] = False,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.999, help="Of the intervals; and that no change is a false alarm.")
    ] = 0.95,
    resamples: Annotated[int, typer.Option(min=200, help="How often each side is drawn again.")] = RESAMPLES,
    fail_on_regression: Annotated[
        bool, typer.Option("--fail-on-regression", help="Exit with 1 if a figure is worse beyond noise.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Directory; artifacts/load/compare-TIME by default.")] = None,
) -> None:
    """Compare two load tests: what changed beyond noise, in which direction, by how much."""
    with one_line_errors(_console):
        sides = (read_side("before", before), read_side("after", after))
        differing = check_comparable(sides, force)
        output = output or Path("artifacts/load") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
        make_directory(output)
        ours, theirs = (side.runs for side in sides)
        rows = compare_runs(ours, theirs, confidence, resamples, _tell)
        comparison = Comparison(*sides, rows, confidence, resamples, draws_runs(ours, theirs), differing)
        _conclude(comparison, output)
    if fail_on_regression and comparison.worse:
        raise typer.Exit(1)


def _conclude(comparison: Comparison, output: Path) -> None:
    """Say what came out, and write it into ``output``."""
    print_table("Before and after", short_rows(comparison.rows))
    for line in comparison.warnings:
        _console.print(line, style="yellow", markup=False, soft_wrap=True)
    typer.echo(comparison.verdict)
    with writing(output):
        text = json.dumps(comparison.as_json(), indent=1, allow_nan=False)
        (output / COMPARISON).write_text(text + "\n", encoding="utf-8")
    page = comparison_page(comparison)
    _console.print(f"{write_report(output, page)}", markup=False, soft_wrap=True)


def _tell(line: str) -> None:
    _console.print(line, style="dim", markup=False)
