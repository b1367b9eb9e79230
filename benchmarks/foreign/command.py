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
from benchmarks.foreign.reasons import Kind, Outcome, Reason, Sorted, read_reasons, sort, unused
from benchmarks.foreign.run import run, target
from benchmarks.foreign.suites import Suite
from benchmarks.result import Result
from inflight.errors import InvalidRequest

_PAGE = Page(
    "Tests of other servers, pointed at the gateway",
    "vLLM's, SGLang's and llama.cpp's own tests of their servers, run unchanged on the demo behind the gateway. Written "
    'by `make bench ARGS="foreign --output docs/results/foreign"`; [the page on foreign tests](../../foreign-tests.md) '
    "says how they are run, and which are not.",
    [f"{part}{name}" for part in ("", "reasons-") for name in suites.SUITES],
)


def foreign(
    names: Annotated[list[str] | None, typer.Argument(metavar="[SUITE]...", help="vllm, sglang, llama.cpp.")] = None,
    sglang: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A source tree of SGLang; no package has its tests.")
    ] = None,
    output: Output = None,
) -> None:
    """Run the tests of other servers against the gateway; without names all that can be had."""

    def results() -> Iterator[Result]:
        reasons = read_reasons()
        home = CLIENTS.make(SUITES)
        for suite in _chosen(names, sglang):
            with target(suite) as at:
                outcomes = run(suite, home, at, sglang, FOLDER / "foreign")
            failures = sort(suite.name, outcomes, reasons)
            for reason in unused(suite.name, failures, reasons):
                console.print(f"no failure has the reason: {reason.why}", markup=False)
            yield from _results(suite, _source(suite, sglang), outcomes, failures)

    words = [*(names or []), *(["--sglang", "TREE"] if sglang else [])]
    report_results(results, command_line("foreign", *words), output, _PAGE)


def _chosen(names: Sequence[str] | None, sglang: Path | None) -> list[Suite]:
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


def _results(suite: Suite, source: str, outcomes: Sequence[Outcome], failures: Sequence[Sorted]) -> Iterator[Result]:
    counts = Counter(one.outcome for one in outcomes)
    kinds = Counter(one.kind for one in failures)
    finding = (
        f"{source}: {counts['passed']} of {len(outcomes)} tests pass, {counts['failed']} fail and {counts['skipped']} are "
        f"skipped, which call parts of the server's own program. Of the failures {kinds[Kind.DEFECT]} are for a defect of "
        f"Inflight, and {kinds[Kind.UNSORTED]} have no reason yet."
    )
    yield Result(suite.name, f"{suite.project}: its test files", finding, list(_by_file(outcomes)))
    told = Counter((one.kind, one.why) for one in failures)
    order = sorted(told, key=lambda key: (list(Kind).index(key[0]), -told[key], key[1]))
    rows = [{"kind": kind.value, "reason": why, "failures": told[kind, why]} for kind, why in order]
    if rows:
        yield Result(f"reasons-{suite.name}", f"{suite.project}: why tests fail", "", rows)


def _by_file(outcomes: Sequence[Outcome]) -> Iterator[dict[str, float | str]]:
    ends = ("passed", "failed", "skipped")
    for file in sorted({one.test.partition("::")[0] for one in outcomes}):
        counts = Counter(one.outcome for one in outcomes if one.test.partition("::")[0] == file)
        yield {"file": file, **{end: counts[end] for end in ends}}
