"""What every command has in common: how it measures, shows what it measured, and writes the files of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from benchmarks.result import Result, write_page, write_result, write_results
from inflight.report.failures import one_line_errors
from inflight.report.table import print_table

console = Console(stderr=True, highlight=False)
FOLDER = Path("artifacts/bench")
"""Where commands leave what is not a result: checkpoints, traces, samples."""

Output = Annotated[
    Path | None, typer.Option(file_okay=False, help="Write JSON, pictures and a page to this folder too.")
]
OutputFile = Annotated[Path | None, typer.Option(dir_okay=False, help="Write the results to this JSON file too.")]


class Page(NamedTuple):
    """The page of a folder of results."""

    title: str
    lead: str
    order: Sequence[str]
    """The names of the results."""


def command_line(*words: str) -> str:
    """Return the command that repeats a measurement."""
    return f'make bench ARGS="{" ".join(words)}"'


def report_results(measure: Callable[[], Iterable[Result]], command: str, output: Path | None, page: Page) -> None:
    """Measure, show each result, and write it to the folder ``output``; a failure is one line."""
    with one_line_errors(console):
        for result in measure():
            print_table(result.title, result.rows)
            console.print(result.finding, result.caveat, "", sep="\n", markup=False, soft_wrap=True)
            if output is not None:
                write_result(result, output, command)
                write_page(output, *page)


def report_rows(measure: Callable[[], Iterable[Any]], title: str, command: str, output: Path | None) -> None:
    """Measure, show a row for each dataclass, and write all rows to the file ``output``; a failure is one line."""
    with one_line_errors(console):
        rows = [asdict(result) for result in measure()]
        print_table(title, rows)
        if output is not None:
            write_results(output, command, rows)
