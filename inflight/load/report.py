"""A result as an HTML page."""

from __future__ import annotations

from inflight.load.charts import course_figure, distribution_figure, latency_figure
from inflight.load.result import EXCLUDED, LoadResult
from inflight.load.rows import counts, distribution_rows, fact_rows, limits, outcome_rows, rate_rows, verdict
from inflight.report.page import Section, render_page
from inflight.report.results import provenance


def report_page(result: LoadResult) -> str:
    """Return the page of one load test."""
    good, said = verdict(result)
    figures, by_class = result.figures(), list(result.by_class().items())
    sections = [Section(text=said, verdict=good)]
    if result.interrupted:
        why = f": {result.fault}" if result.fault else ""
        said = f"The test was interrupted{why}; this is what was measured until then."
        sections.append(Section(text=said, verdict=False))
    if not result.steady:
        said = "It ended in the ramp-up, before the measured window: the figures are not those of a steady load."
        sections.append(Section(text=said, verdict=False))
    heading = "In the measured window" if result.steady else "In the ramp-up"
    sections += [
        Section(heading, f"{counts(figures)}. {_limits(result)}", fact_rows(figures)),
        Section("Latencies", f"{EXCLUDED} {_start(result)}", distribution_rows(figures)),
        Section("Throughput and running requests", figure=course_figure(result)),
    ]
    if any(one.outcome == "completed" for one in result.records):
        sections += [
            Section(
                "Distributions", "Share of samples that are at or below a value.", figure=distribution_figure(result)
            ),
            Section("Latency over time", figure=latency_figure(result)),
        ]
    if len(by_class) > 1:
        sections.append(Section("Classes", table=rate_rows(by_class)))
        sections += [Section(f"Latencies of {name}", table=distribution_rows(figures)) for name, figures in by_class]
    sections.append(Section("How requests ended", table=outcome_rows([*by_class, ("all", figures)])))
    if len(result.scenario.phases) > 1:
        text = "Each phase by itself, steady or not: requests that started in it, tokens that arrived in it."
        sections.append(Section("Phases", text, rate_rows(result.by_phase())))
    return render_page(f"Load test: {result.scenario.name}", _lead(result), sections, _footer(result))


def _lead(result: LoadResult) -> str:
    loop = "open loop" if result.scenario.open else "closed loop"
    begin, end = result.window
    return (
        f"{result.scenario.description.strip()} {loop.capitalize()} over {result.transport}, seed {result.seed}; "
        f"measured from {begin:.1f} to {end:.1f} s."
    ).strip()


def _start(result: LoadResult) -> str:
    if result.scenario.open:
        return "They count from the time at which a request was scheduled; what the client sent late is in them."
    return "They count from sending."


def _limits(result: LoadResult) -> str:
    said = {name: limits(slo) for name, slo in result.slo_of.items() if limits(slo)}
    if not said:
        return "There are no limits (slo), and so no goodput."
    same = len(set(said.values())) == 1 and len(said) == len(result.slo_of)
    text = next(iter(said.values())) if same else "; ".join(f"{name}: {what}" for name, what in said.items())
    return f"Goodput counts requests within the limits: {text}."


def _footer(result: LoadResult) -> str:
    made = provenance()
    return f"{result.command}; commit {made['commit']}, {made['machine']}, {made['date']}"
