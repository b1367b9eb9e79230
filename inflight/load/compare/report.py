"""A comparison for people: rows, a sentence, the figure of intervals, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inflight.load.compare.bootstrap import MANY_RUNS
from inflight.load.compare.compare import Row
from inflight.load.compare.sides import Side
from inflight.report.page import Section, render_page
from inflight.report.results import provenance

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Comparison:
    """Two sides, and what came out."""

    before: Side
    after: Side
    rows: list[Row]
    confidence: float
    resamples: int
    draws_runs: bool
    """Whether differences between runs of a side are in the intervals."""
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
        runs = (
            "Differences between runs are in the intervals."
            if self.draws_runs
            else f"How much two runs of the same server differ is not in the intervals: that takes {MANY_RUNS} runs or "
            f"more of each side."
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


def short_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row per figure, for a terminal."""
    hidden = {"before", "after"}
    plain = [{"before": _short(row.before), "after": _short(row.after)} for row in rows]
    full = [{name: text for name, text in row.items() if name not in hidden} for row in table_rows(rows)]
    return [{"figure": row.pop("figure")} | ends | row for ends, row in zip(plain, full, strict=True)]


def table_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row per figure, as people read it."""
    return [
        {
            "figure": f"{row.name}, {row.unit}",
            "before": _with_interval(row.before, row.before_interval),
            "after": _with_interval(row.after, row.after_interval),
            "change": change_text(row),
            "interval": _change_interval(row),
            "p": "" if row.p is None else f"{row.p:.2g}",
            "verdict": row.verdict,
        }
        for row in rows
    ]


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    return f"{_short(value)} [{_short(interval[0])}, {_short(interval[1])}]"


def _change_interval(row: Row) -> str:
    low, high = row.percent_interval or row.change_interval
    return f"[{low:+.1f}, {high:+.1f}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def comparison_page(comparison: Comparison) -> str:
    """Return the HTML page of a comparison.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from inflight.load.compare.charts import interval_figure

    sections = [Section(text=comparison.verdict, verdict=not comparison.worse)]
    sections += [Section(text=line, verdict=False) for line in comparison.warnings]
    shown = [row for row in comparison.rows if row.percent is not None]
    if shown:
        sections.append(Section("Change, percent", comparison.notes, figure=interval_figure(shown)))
    sections.append(Section("Figures", table=table_rows(comparison.rows)))
    lead = f"Before is {comparison.before.title}. After is {comparison.after.title}."
    made = provenance()
    return render_page("Comparison of load tests", lead, sections, f"commit {made['commit']}, {made['date']}")
