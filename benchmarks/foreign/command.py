"""``make bench ARGS=foreign``: the tests of other servers, pointed at the gateway, and why those fail that do."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.clients import CLIENTS, SUITES
from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from benchmarks.foreign import suites
from benchmarks.foreign.reasons import Kind, Outcome, Sorted, read_reasons, sort, unused
from benchmarks.foreign.run import outcomes, run, target
from benchmarks.foreign.suites import Suite
from benchmarks.result import Result
from inflight.errors import InvalidRequest

_ENDS = ("passed", "failed", "skipped")
_FIRST = "Each failure has the first reason of the list in benchmarks/foreign/reasons.toml that fits it."
_ORDER = (Kind.UNSORTED, Kind.DEFECT, *(kind for kind in Kind if kind not in (Kind.UNSORTED, Kind.DEFECT)))
"""What is to be looked at comes first."""
_KEPT = FOLDER / "foreign"
"""Where the outcomes of the last run are."""
_PAGE = Page(
    "Tests of other servers, pointed at the gateway",
    "vLLM's, SGLang's and llama.cpp's own tests of their servers, run unchanged on the demo behind the gateway. "
    'Written by `make bench ARGS="foreign --output docs/results/foreign"`; [tests of other '
    "servers](../../foreign-tests.md) says how they are run, and which are not.",
    ["suites", *(f"{part}{name}" for name in suites.SUITES for part in ("", "reasons-"))],
)


def foreign(
    names: Annotated[list[str] | None, typer.Argument(metavar="[SUITE]...", help="vllm, sglang, llama.cpp.")] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="A source tree of SGLang, for its tests."),
    ] = None,
    kept: Annotated[bool, typer.Option(help="Sort once more what the last run left, and run nothing.")] = False,
    output: Output = None,
) -> None:
    """Run the tests of other servers against the gateway; without names all that can be had.

    The code is 1 where a failure has no reason.
    """

    unsorted: list[Sorted] = []

    def results() -> Iterator[Result]:
        reasons, rows = read_reasons(), []
        for suite in _chosen(names, sglang):
            if not kept:
                with target(suite) as at:
                    run(suite, CLIENTS.make(SUITES), at, sglang, _KEPT)
            ended = outcomes(suite, _KEPT)
            failures = sort(suite.name, ended, reasons)
            for reason in unused(suite.name, failures, reasons):
                console.print(f"no failure has the reason: {reason.why}", markup=False)
            unsorted.extend(one for one in failures if one.reason is None)
            rows.append(_row(suite, _source(suite, sglang), ended, failures))
            yield from _results(suite, ended, failures)
        if len(rows) == len(suites.SUITES):
            yield Result("suites", "The suites", _FINDING, rows)

    words = [*(names or []), *(["--sglang", "TREE"] if sglang else [])]
    report_results(results, command_line("foreign", *words), output, _PAGE)
    if unsorted:
        console.print(f"{len(unsorted)} failures have no reason; benchmarks/foreign/reasons.toml lists reasons:")
        for one in unsorted:
            console.print(f"  {one.why}", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _chosen(names: Sequence[str] | None, sglang: Path | None) -> list[Suite]:
    if sglang is not None and not sglang.is_dir():
        raise InvalidRequest(f"--sglang: {sglang} is no folder")
    for name in names or ():
        if name not in suites.SUITES:
            raise InvalidRequest(f"{name!r} is not one of {', '.join(suites.SUITES)}")
        if not suites.SUITES[name].folder and sglang is None:
            raise InvalidRequest(f"{name}: give the source tree with --sglang")
    chosen = [suites.SUITES[name] for name in names or suites.SUITES]
    return [suite for suite in chosen if suite.folder or sglang]


def _source(suite: Suite, given: Path | None) -> str:
    """Return what was run: a package's version, or the commit of a tree."""
    if suite.folder or given is None:
        return suite.source
    words = ["git", "-C", str(given), "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "a source tree"


_FINDING = (
    "A test is skipped that calls parts of its server's own program. The tables below have the reasons of failures; a "
    "failure without a reason comes first there, with its name."
)


def _row(suite: Suite, source: str, ended: Sequence[Outcome], failures: Sequence[Sorted]) -> dict[str, float | str]:
    counts, kinds = Counter(one.outcome for one in ended), Counter(one.kind for one in failures)
    return {
        "suite": suite.project,
        "source": source,
        **{end: counts[end] for end in _ENDS},
        "for a defect": kinds[Kind.DEFECT],
        "without a reason": kinds[Kind.UNSORTED],
    }


def _results(suite: Suite, ended: Sequence[Outcome], failures: Sequence[Sorted]) -> Iterator[Result]:
    kinds = Counter(one.kind for one in failures)
    told = ", ".join(f"{kinds[kind]} {kind.value}" for kind in _ORDER if kinds[kind])
    finding = f"{len(failures)} of {len(ended)} tests fail: {told}."
    yield Result(suite.name, f"{suite.project}: its test files", finding, list(_by_file(ended)))
    reasons = Counter((one.kind, one.why) for one in failures)
    order = sorted(reasons, key=lambda key: (_ORDER.index(key[0]), -reasons[key], key[1]))
    rows = [{"kind": kind.value, "reason": why, "failures": reasons[kind, why]} for kind, why in order]
    if rows:
        yield Result(f"reasons-{suite.name}", f"{suite.project}: why tests fail", _FIRST, rows)


def _by_file(ended: Sequence[Outcome]) -> Iterator[dict[str, float | str]]:
    for file in sorted({one.test.partition("::")[0] for one in ended}):
        counts = Counter(one.outcome for one in ended if one.test.partition("::")[0] == file)
        yield {"file": file, **{end: counts[end] for end in _ENDS}}
