"""The result of a sweep: the record for programs, the lines in the terminal and the page for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from inflight.load.report import Row, limits_by_class
from inflight.load.scenario import Scenario, Slo
from inflight.load.sweep.search import Findings, SweepPlan, find
from inflight.load.sweep.step import SHORTFALL_LIMIT, Level
from inflight.report.page import Section, render_page
from inflight.report.plots import BLUE, GOOD, GREY, ORANGE, YELLOW, Line, Mark, Panel, Panels
from inflight.report.provenance import provenance, source_line
from inflight.report.table import figure
from inflight.report.units import significant

_OPEN = (
    "Open loop: the knee is the rate at which what is offered meets the most that was answered. Hollow points are "
    f"loads that the server did not keep up with (more than {SHORTFALL_LIMIT:.0%} unanswered in the window): its queue "
    "grows as long as the load lasts, and their latencies say how long that was."
)
_CLOSED = (
    "Closed loop: the knee is the concurrency with the most power, throughput over mean latency. Below it a request "
    "more adds throughput, above it only waiting."
)
_LATENCIES = {"TTFT": "ttft_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}
_PERCENTILES = {"p50": BLUE, "p95": YELLOW, "p99": ORANGE}


@dataclass(frozen=True)
class SweepResult:
    """A sweep that was run."""

    scenario: Scenario
    slo: Slo | None
    """The limits in place of the scenario's; None: the scenario's hold."""
    plan: SweepPlan
    seed: int
    levels: list[Level]
    command: str
    stopped: str
    """What ended it before it was done; empty: nothing did."""

    @property
    def findings(self) -> Findings:
        """What it says."""
        return find(self.plan, self.levels)

    @property
    def lines(self) -> list[str]:
        """What was found, a line each."""
        slo_of = {one.name: self.slo or self.scenario.slo_of(one.name) for one in self.scenario.classes}
        lines = finding_lines(self.plan, self.levels, limits_by_class(slo_of))
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


def finding_lines(plan: SweepPlan, levels: Sequence[Level], limits: str) -> list[str]:
    """Return what was found, a line each; ``limits`` in words."""
    findings, lines = find(plan, levels), []
    if (knee := findings.knee) is not None:
        line = (
            f"Knee at {_load(plan, knee.load)}: {knee.requests_per_second:.2f} requests/s, "
            f"{knee.output_tokens_per_second:,.0f} output tokens/s."
        )
        if plan.open:
            kept = "no load that was measured" if knee.below is None else figure(knee.below)
            line += f" The server kept up with {kept} and not with {figure(knee.above)}."
        else:
            most = max(level.answered for level in _shown(levels))
            line += f" The most that any load got is {most:.2f} requests/s."
        lines.append(line)
    if (usable := findings.usable) is not None:
        broken = "" if usable.broken_at is None else f"; {figure(usable.broken_at)} broke them"
        lines.append(
            f"{_load(plan, usable.load)} keeps {limits} for {usable.attainment:.1%} of the requests (at least "
            f"{plan.share:.0%} must): {usable.goodput:.2f} requests/s of goodput{broken}."
        )
    return [*lines, *findings.notes]


def _load(plan: SweepPlan, load: float) -> str:
    return f"{figure(load)} sessions/s" if plan.open else f"{load:.0f} sessions at a time"


def _shown(levels: Sequence[Level]) -> list[Level]:
    """Return the levels that show the server and not the client."""
    return [level for level in levels if not level.client_bound]


def sweep_page(result: SweepResult) -> str:
    """Return the HTML page of a sweep."""
    plan, levels, findings = result.plan, result.levels, result.findings
    good = sum(one is not None for one in (findings.knee, findings.usable))
    text = "Means of the runs at a load, without those whose client was too slow."
    sections = [Section(text=text, verdict=number < good) for number, text in enumerate(result.lines)]
    sections += [
        Section("Latency over throughput", _OPEN if plan.open else _CLOSED, plot=_curves(plan, levels, findings)),
        Section("Over the load", plot=_over_load(plan, _shown(levels), findings)),
        Section("Loads", text, [_throughput_row(plan, level) for level in levels]),
        Section("Latencies, ms", table=[{"load": round(level.load, 3)} | _percentiles(level) for level in levels]),
    ]
    loop = "open loop, sessions per second" if plan.open else "closed loop, sessions at a time"
    lead = f"{result.scenario.description.strip()} Swept as {loop}, from {plan.low:g}; seed {result.seed}.".strip()
    return render_page(f"Sweep: {result.scenario.name}", lead, sections, source_line(result.command))


def _throughput_row(plan: SweepPlan, level: Level) -> Row:
    """Return what came at a load, what was answered, and how the rest ended."""
    row: Row = {"load": round(level.load, 3), "runs": len(level.tried)}
    if plan.open:
        row |= {"offered/s": round(level.offered, 2)}
    row |= {"answered/s": round(level.answered, 2)}
    if plan.open:
        row |= {"unanswered": f"{level.shortfall:.1%}", "queue/s": round(level.queue_growth, 2)}
    else:
        row |= {"power": significant(level.power)}
    row |= {"tokens/s": round(level.output_tokens_per_second, 1)}
    if level.goodput is not None:
        row |= {"goodput/s": round(level.goodput, 2), "within limits": f"{level.attainment:.1%}"}
    for outcome in ("refused", "failed", "unfinished"):
        row[outcome] = sum(step.figures.outcomes.get(outcome, 0) for step in level.tried)
    return row | {"client": "too slow" if level.client_bound else "ok"}


def _percentiles(level: Level) -> Row:
    """Return the percentiles of a load's latencies, in milliseconds."""
    values = {f"{label} {which}": _percentile(level, label, which) for label in _LATENCIES for which in _PERCENTILES}
    return {name: None if value is None else round(value, 1) for name, value in values.items()}


def _percentile(level: Level, label: str, which: str) -> float | None:
    """Return the mean of a percentile over a load's steps, in milliseconds; None: no step has a sample."""
    known = [getattr(step.figures, _LATENCIES[label]) for step in level.steps]
    values = [getattr(one, which) for one in known if one is not None]
    return sum(values) / len(values) if values else None


def _curves(plan: SweepPlan, levels: Sequence[Level], findings: Findings) -> Panels:
    """Return TTFT and ITL over the throughput that was reached, the loads in order."""
    answered = {level.load: level.answered for level in levels}
    knee = None if findings.knee is None else findings.knee.requests_per_second
    marks = _marks(knee, None if findings.usable is None else answered[findings.usable.load])
    panels = []
    for label in ("TTFT", "ITL"):
        lines = []
        for which, colour in _PERCENTILES.items():
            known = [(one, ms) for one in _shown(levels) if (ms := _percentile(one, label, which)) is not None]
            hollow = [plan.open and not level.keeps_up for level, _ in known]
            throughputs, latencies = [level.answered for level, _ in known], [ms for _, ms in known]
            lines.append(Line(throughputs, latencies, colour, which, marker="o", hollow=hollow))
        panels.append(Panel("requests/s answered", f"{label}, ms", lines, marks, log_y=True))
    return Panels(panels, height=4.2)


def _over_load(plan: SweepPlan, shown: Sequence[Level], findings: Findings) -> Panels:
    """Return throughput, what the knee is read from, and goodput, over the load."""
    knee, usable = findings.knee, findings.usable
    marks = _marks(None if knee is None else knee.load, None if usable is None else usable.load)
    answered = [level.answered for level in shown]
    curves = {"requests/s answered": (answered, BLUE)}
    if plan.open:
        curves["queue growth, requests/s"] = ([level.queue_growth for level in shown], ORANGE)
    else:
        curves["power, requests/s per second"] = ([level.power for level in shown], ORANGE)
    if any(level.goodput is not None for level in shown):
        curves["goodput, requests/s"] = ([level.goodput or 0.0 for level in shown], GOOD)
    panels = []
    for label, (heights, colour) in curves.items():
        lines = [Line([level.load for level in shown], heights, colour, marker="o")]
        bounds = _asymptotes(plan, shown) if heights is answered else []
        highest = 1.15 * max(answered) if bounds else None
        lowest = None if label.startswith("queue") else 0
        x_label = "sessions/s" if plan.open else "sessions at a time"
        panels.append(Panel(x_label, label, lines + bounds, marks, y_limits=(lowest, highest), log_x=not plan.open))
    return Panels(panels)


def _marks(knee: float | None, usable: float | None) -> list[Mark]:
    marks = [] if knee is None else [Mark(knee, "knee")]
    return marks if usable is None else [*marks, Mark(usable, "keeps the limits", GOOD, "-.")]


def _asymptotes(plan: SweepPlan, levels: Sequence[Level]) -> list[Line]:
    """Return the two lines that throughput cannot be above: what comes, and the most that was reached."""
    if not levels:
        return []
    light, top = levels[0], max(level.answered for level in levels)
    slope = light.offered / light.load if plan.open else 1 / light.mean_e2e_s if light.mean_e2e_s else 0.0
    loads = np.geomspace(light.load, levels[-1].load)
    return [Line(loads, bound, GREY, shape="dotted") for bound in (slope * loads, np.full(len(loads), top))]
