"""The command that measures guided decoding: what masks cost, and how far guides keep to JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from inflight.report.failures import one_line_errors

if TYPE_CHECKING:
    from benchmarks.result import Result

_NAMES = ("masks", "shares", "suite")
_PAGE = Page(
    "Guided decoding",
    "What the masks of guides cost, and how far the guide layer keeps to JSON Schema. Written by "
    '`make bench ARGS="guided --output docs/results/guided"`; '
    "[guided decoding](../../guided-decoding.md) says what the words mean.",
    ("masks", "shares", "suite", "suite-refusals", "maskbench", "maskbench-refusals"),
)


def guided(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(_NAMES)}; all by default.")] = None,
    maskbench: Annotated[
        Path | None, typer.Option(file_okay=False, help="MaskBench's maskbench/data: measure its instances too.")
    ] = None,
    checkpoints: Annotated[Path, typer.Option(help="Where checkpoints and suites are, or are put.")] = FOLDER,
    output: Output = None,
) -> None:
    """Measure guided decoding: the masks of a step, their share in it, and JSON Schema's test suite."""
    chosen = list(names or _NAMES)
    for name in chosen:
        if name not in _NAMES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(_NAMES)}", param_hint="NAMES")
    with one_line_errors(console):
        from benchmarks.guided.conformance import measure_conformance
        from benchmarks.guided.masks import measure_masks, measure_shares
        from benchmarks.guided.suites import instances_of, official_suite

    def measure() -> Iterator[Result]:
        if "masks" in chosen:
            yield from measure_masks()
        if "shares" in chosen:
            yield from measure_shares(checkpoints)
        if "suite" in chosen:
            yield from measure_conformance("suite", "JSON-Schema-Test-Suite", official_suite(checkpoints / "suites"))
        if maskbench is not None:
            yield from measure_conformance("maskbench", "MaskBench's instances", instances_of(maskbench))

    options = ["--maskbench maskbench/data"] if maskbench is not None else []
    report_results(measure, command_line("guided", *(names or ()), *options), output, _PAGE)
