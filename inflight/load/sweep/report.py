"""The files of a sweep: sweep.json for programs, report.html for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight.load.result import writing
from inflight.load.rows import limits
from inflight.load.scenario import Scenario, Slo
from inflight.load.sweep.knee import Findings, find
from inflight.load.sweep.rows import finding_lines, latency_rows, throughput_rows
from inflight.load.sweep.search import Plan
from inflight.load.sweep.step import SHORTFALL_LIMIT, Level
from inflight.report.page import Section, render_page
from inflight.report.results import provenance

SWEEP = "sweep.json"
_OPEN = (
    "Open loop: the knee is the rate at which what is offered meets the most that was answered. Hollow points are "
    f"loads that the server did not keep up with (more than {SHORTFALL_LIMIT:.0%} unanswered in the window): its queue "
    "grows as long as the load lasts, and their latencies say how long that was."
)
_CLOSED = (
    "Closed loop: the knee is the concurrency with the most power, throughput over mean latency. Below it a request "
    "more adds throughput, above it only waiting."
)


@dataclass(frozen=True)
class SweepResult:
    """A sweep that was run."""

    scenario: Scenario
    slo: Slo | None
    """In place of the scenario's."""
    plan: Plan
    seed: int
    levels: list[Level]
    command: str
    stopped: str
    """What ended it before it was done; empty: nothing."""

    @property
    def findings(self) -> Findings:
        """What it says."""
        return find(self.plan, self.levels)

    @property
    def limits(self) -> str:
        """The limits in words."""
        if self.slo is not None:
            return limits(self.slo)
        own = {one.name: limits(self.scenario.slo_of(one.name)) for one in self.scenario.classes}
        if len(set(own.values())) == 1:
            return next(iter(own.values()))
        return "; ".join(f"{name}: {text}" for name, text in own.items() if text)

    @property
    def lines(self) -> list[str]:
        """What was found, a line each."""
        lines = finding_lines(self.plan, self.levels, self.limits)
        return [*lines, f"The sweep did not come to its end: {self.stopped}."] if self.stopped else lines

    def as_json(self) -> dict[str, Any]:
        """Return everything as a JSON object."""
        return {
            "command": self.command,
            **provenance(),
            "stopped": self.stopped or None,
            "plan": asdict(self.plan),
            "seed": self.seed,
            "slo": None if self.slo is None else self.slo.model_dump(exclude_none=True),
            "findings": asdict(self.findings),
            "steps": [asdict(step) for level in self.levels for step in level.tried],
            "scenario": self.scenario.model_dump(mode="json"),
            "files": self.scenario.files,
        }


def write_sweep(directory: Path, result: SweepResult) -> None:
    """Write sweep.json into ``directory``, which exists.

    Raises:
        ResultError: it cannot be written.
    """
    with writing(directory):
        (directory / SWEEP).write_text(json.dumps(result.as_json(), indent=1) + "\n", encoding="utf-8")


def sweep_page(result: SweepResult) -> str:
    """Return the HTML page of a sweep.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from inflight.load.sweep.charts import curve_figure, load_figure

    plan, levels, findings = result.plan, result.levels, result.findings
    good = sum(one is not None for one in (findings.knee, findings.usable))
    sections = [Section(text=text, verdict=number < good) for number, text in enumerate(result.lines)]
    sections += [
        Section(
            "Latency over throughput", _OPEN if plan.open else _CLOSED, figure=curve_figure(plan, levels, findings)
        ),
        Section("Over the load", figure=load_figure(plan, levels, findings)),
        Section(
            "Loads",
            "Means of the runs at a load, without those whose client was too slow.",
            throughput_rows(plan, levels),
        ),
        Section("Latencies, ms", table=latency_rows(levels)),
    ]
    made = provenance()
    footer = f"{result.command}; commit {made['commit']}, {made['machine']}, {made['date']}"
    loop = "open loop, sessions per second" if plan.open else "closed loop, sessions at a time"
    lead = f"{result.scenario.description.strip()} Swept as {loop}, from {plan.low:g}; seed {result.seed}.".strip()
    return render_page(f"Sweep: {result.scenario.name}", lead, sections, footer)
