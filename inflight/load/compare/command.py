"""``inflight load compare``: whether a server has changed between two load tests, in a sentence, a table and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from inflight.load.compare.bootstrap import MANY_RUNS, RESAMPLES
from inflight.load.compare.compare import CompareError, Row
from inflight.load.compare.compare import compare as compare_runs
from inflight.load.compare.samples import Run
from inflight.load.result import REPORT, SUMMARY, make_directory, read_records, read_summary, write
from inflight.load.scenario import Slo
from inflight.report.failures import one_line_errors
from inflight.report.page import Section, render_page
from inflight.report.plots import BAD, FRAME, GOOD, GREY, Line, Mark, Panel, Panels
from inflight.report.provenance import provenance
from inflight.report.table import print_table

COMPARISON = "comparison.json"
_SAME = ("machine", "transport", "deployment")
_SAME_PARTS = ("scenario", "files")
"""What is compared key by key; the hashes tell of a file that kept its name."""
_COLOURS = {"worse": BAD, "better": GOOD, "no change": GREY, "too few": FRAME}
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
        first, second = read_side("before", before), read_side("after", after)
        differing = check_comparable((first, second), force)
        output = make_directory(output, "compare")
        rows = compare_runs(first.runs, second.runs, confidence, resamples, _tell)
        comparison = Comparison(first, second, rows, confidence, resamples, differing)
        print_table("Before and after", table_rows(comparison.rows, intervals=False))
        for line in comparison.warnings:
            _console.print(line, style="yellow", markup=False, soft_wrap=True)
        typer.echo(comparison.verdict)
        write(output / COMPARISON, json.dumps(comparison.as_json(), indent=1) + "\n")
        _console.print(f"{write(output / REPORT, comparison_page(comparison))}", markup=False, soft_wrap=True)
    if fail_on_regression and comparison.worse:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    _console.print(line, style="dim", markup=False)


@dataclass(frozen=True)
class Side:
    """One or several runs of the same test."""

    name: str
    summaries: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]

    @property
    def title(self) -> str:
        """What it is, in a line."""
        commits = sorted({str(one["commit"]) for one in self.summaries})
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{self.name}: {runs}, client commit {', '.join(commits)}, {self.summaries[0]['date']}"

    @property
    def warnings(self) -> list[str]:
        """Why its figures may not be the server's, a line each."""
        lines = []
        for one in self.summaries:
            if one["client"]["bottleneck"]:
                lines.append(f"{self.name}: the client was a bottleneck: {'; '.join(one['client']['reasons'])}")
            if one["interrupted"]:
                lines.append(f"{self.name}: a test was interrupted")
        return lines


def read_side(name: str, directory: Path) -> Side:
    """Read a result directory, or a directory of several: the repeats of one test.

    Raises:
        ResultError: there is none, or it cannot be read.
    """
    single = (directory / SUMMARY).is_file()
    found = [directory] if single else sorted(path.parent for path in directory.glob(f"*/{SUMMARY}"))
    if not found:
        raise CompareError(f"{directory}: neither a result of `inflight load run` nor a directory of such")
    summaries = tuple(read_summary(one) for one in found)
    runs = tuple(_run(one, summary) for one, summary in zip(found, summaries, strict=True))
    return Side(name, summaries, runs)


def _run(directory: Path, summary: dict[str, Any]) -> Run:
    records = read_records(directory)
    try:
        scenario = summary["scenario"]
        own = {one["name"]: one.get("slo") for one in scenario.get("classes", ())}
        names = {one.class_name for one in records}
        slo_of = {name: Slo.model_validate(own.get(name) or scenario.get("slo") or {}) for name in names}
        begin, end = summary["figures"]["window_s"]
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(f"{directory / SUMMARY}: not a summary of `inflight load run`: {error!r}") from None
    if not any(begin <= one.start_s < end for one in records):
        raise CompareError(f"{directory}: no request started in the measured window")
    return Run(records, (begin, end), slo_of)


def check_comparable(sides: Sequence[Side], force: bool) -> list[str]:
    """Return by name what the runs do not have in common and should; what is compared is the server alone.

    Raises:
        CompareError: something differs, and ``force`` is not set.
    """
    first, *rest = [one for side in sides for one in side.summaries]
    found = []
    for one in rest:
        for part in _SAME_PARTS:
            here, there = first.get(part, {}), one.get(part, {})
            found += [f"{part}.{key}" for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
        pairs = [(name, first.get(name, ""), one.get(name, "")) for name in _SAME]
        found += [f"{name} ({mine} and {other})" for name, mine, other in pairs if mine != other]
    seeds = [sorted(one["seed"] for one in side.summaries) for side in sides]
    if seeds[0] != seeds[1]:
        found.append("seed ({} and {})".format(*(", ".join(map(str, one)) for one in seeds)))
    found = list(dict.fromkeys(found))
    if found and not force:
        raise CompareError(f"the two differ in {', '.join(found)}; --force compares them all the same")
    return found


@dataclass(frozen=True)
class Comparison:
    """Two sides, and what came out."""

    before: Side
    after: Side
    rows: list[Row]
    confidence: float
    resamples: int
    differing: list[str]
    """What the two do not have in common and should."""

    @property
    def worse(self) -> list[Row]:
        """What has become worse beyond noise."""
        return [row for row in self.rows if row.verdict == "worse"]

    @property
    def verdict(self) -> str:
        """What came out, in a sentence."""
        better = [row for row in self.rows if row.verdict == "better"]
        if not better and not self.worse:
            return "No figure changed beyond noise."
        parts = [
            f"{what}: {', '.join(f'{row.name} {change_text(row)}' for row in rows)}"
            for what, rows in (("Worse", self.worse), ("Better", better))
            if rows
        ]
        return ". ".join(parts) + "."

    @property
    def warnings(self) -> list[str]:
        """What stands against trusting it, a line each."""
        lines = [*self.before.warnings, *self.after.warnings]
        return lines + ([f"They differ in {', '.join(self.differing)}."] if self.differing else [])

    @property
    def notes(self) -> str:
        """How to read it."""
        runs = "Differences between runs are in the intervals."
        if min(len(self.before.runs), len(self.after.runs)) < MANY_RUNS:
            runs = (
                f"How much two runs of the same server differ is not in the intervals: that takes {MANY_RUNS} runs or "
                "more of each side."
            )
        sure = f"{self.confidence:.0%}"
        return (
            f"Intervals are of {sure}, each by itself, from {self.resamples:,} resamples of requests (latencies, "
            f"shares) and of stretches of time (rates). A verdict counts all figures: with {sure} certainty none of "
            f"them is a false alarm (Holm), so an interval without 0 may still be no change. {runs}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            "before": self.before.title,
            "after": self.after.title,
            "verdict": self.verdict,
            "warnings": self.warnings,
            "confidence": self.confidence,
            "resamples": self.resamples,
            "figures": [row.as_json() for row in self.rows],
        }


def change_text(row: Row) -> str:
    """Return a change with its sign: in percent; in points, of a percentage; in its unit, from 0."""
    if row.percent is not None:
        return f"{row.percent:+.1f}%"
    return f"{row.change:+.2f} {'points' if row.unit == '%' else row.unit}"


def table_rows(rows: Sequence[Row], intervals: bool) -> list[dict[str, str]]:
    """Return a row per figure, as people read it; ``intervals``: whether both sides have theirs beside them."""
    return [
        {
            "figure": f"{row.name}, {row.unit}",
            "before": _value(row.before, row.before_interval if intervals else ()),
            "after": _value(row.after, row.after_interval if intervals else ()),
            "change": change_text(row),
            "interval": "[{:+.1f}, {:+.1f}]".format(*(row.percent_interval or row.change_interval)),
            "p": "" if row.p is None else f"{row.p:.2g}",
            "verdict": row.verdict,
        }
        for row in rows
    ]


def _value(value: float, interval: Sequence[float]) -> str:
    first, *ends = (f"{one:,.0f}" if abs(one) >= 1000 else f"{one:.4g}" for one in (value, *interval))
    return f"{first} [{', '.join(ends)}]" if ends else first


def comparison_page(comparison: Comparison) -> str:
    """Return the HTML page of a comparison."""
    sections = [Section(text=comparison.verdict, verdict=not comparison.worse)]
    sections += [Section(text=line, verdict=False) for line in comparison.warnings]
    shown = [row for row in comparison.rows if row.percent is not None]
    if shown:
        sections.append(Section("Change, percent", comparison.notes, plot=_intervals(shown)))
    sections.append(Section("Figures", table=table_rows(comparison.rows, intervals=True)))
    lead = f"Before is {comparison.before.title}. After is {comparison.after.title}."
    made = provenance()
    return render_page("Comparison of load tests", lead, sections, f"commit {made['commit']}, {made['date']}")


def _intervals(rows: Sequence[Row]) -> Panels:
    """Return the changes of figures with their intervals, in percent; those that are not judged are pale."""
    lines = []
    for verdict, colour in _COLOURS.items():
        for place, row in enumerate(rows):
            if row.verdict == verdict:
                lines.append(Line(row.percent_interval or (), (place, place), colour))
                lines.append(Line([row.percent or 0.0], [place], colour, verdict, marker="o"))
    names = [row.name for row in rows]
    panel = Panel(
        "after against before, percent", "", lines, [Mark(0, style="-")], x_limits=(None, None), y_names=names
    )
    return Panels([panel], height=0.8 + 0.27 * len(rows))
