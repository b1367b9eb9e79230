"""The result of a load test for people: the lines in the terminal, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from inflight.load.arrivals import starts
from inflight.load.measurements import LATENCIES, Distribution, Figures, RequestRecord
from inflight.load.overhead import CPU_LIMIT, LAG_LIMIT_MS, SEND_DELAY_LIMIT_MS
from inflight.load.result import EXCLUDED, LoadResult
from inflight.load.scenario import Slo
from inflight.report.page import Section, render_page
from inflight.report.plots import BLUE, COLOURS, FRAME, ORANGE, Line, Mark, Panel, Panels
from inflight.report.provenance import source_line
from inflight.report.units import significant

Row = dict[str, object]
_QUANTITIES = {
    "TTFT, ms": "ttft_ms",
    "ITL per token, ms": "itl_ms",
    "ITL, mean of a request, ms": "mean_itl_ms",
    "gap between responses, ms": "gap_ms",
    "E2E, ms": "e2e_ms",
    "queue in the server, ms": "queue_ms",
    "send delay of the client, ms": "send_delay_ms",
    "prompt tokens": "input_tokens",
    "output tokens": "output_tokens",
}
FEW_SAMPLES = 100
"""With fewer samples hardly one lies above the 99th percentile."""
_RATES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2E p99")


def verdict(result: LoadResult) -> tuple[bool, str]:
    """Return whether the figures are the server's and not the client's, and a sentence about it."""
    client = result.client
    lag, share, delay = client.loop_lag_ms, client.cpu_share, client.send_delay_ms
    if client.bottleneck:
        return False, f"The client was a bottleneck: {'; '.join(client.reasons)}. Figures may be its own."
    parts = []
    if lag is not None:
        parts.append(f"event loop lag {lag.p99:.1f} ms at the 99th percentile (limit: {LAG_LIMIT_MS:g})")
    if share is not None:
        parts.append(f"{share:.0%} of a core (limit: {CPU_LIMIT:.0%})")
    if delay is not None:
        parts.append(f"sends {delay.p99:.1f} ms late at the 99th percentile (limit: {SEND_DELAY_LIMIT_MS:g})")
    if not parts:
        return False, "The client's own share is unknown: the measured window was too short for a sample."
    return True, f"The client kept up: {'; '.join(parts)}."


def headline(result: LoadResult) -> list[str]:
    """Return the figures that matter most, a line each."""
    figures, (begin, end) = result.figures, result.window
    window = "the window" if result.steady else "the ramp-up, which is not the measured window,"
    lines = [
        f"{result.scenario.name}: {counts(figures)} in {window} from {begin:.1f} to {end:.1f} s",
        f"  {figures.requests_per_second:.2f} requests/s, {figures.output_tokens_per_second:,.0f} output tokens/s, "
        f"{figures.input_tokens_per_second:,.0f} input tokens/s",
    ]
    shown = {"TTFT": figures.ttft_ms, "ITL": figures.itl_ms, "E2E": figures.e2e_ms}
    for label, one in shown.items():
        if one is not None:
            lines.append(
                f"  {label:4} ms  p50 {one.p50:,.1f}  p95 {one.p95:,.1f}  p99 {one.p99:,.1f}  max {one.max:,.1f}"
            )
    if few := few_samples(shown):
        lines.append(f"  {few}")
    if figures.goodput is not None:
        share = "" if figures.slo_attainment is None else f" ({figures.slo_attainment:.1%} of the requests)"
        lines.append(f"  goodput {figures.goodput:.2f} requests/s{share}")
    return lines


def few_samples(named: Mapping[str, Distribution | None]) -> str:
    """Return a warning of the quantities that have too few samples for their p99; "": none has."""
    few = [f"{label} has {one.count}" for label, one in named.items() if one is not None and one.count < FEW_SAMPLES]
    return f"p99 of fewer than {FEW_SAMPLES} samples is about the largest of them: {', '.join(few)}" if few else ""


def counts(figures: Figures) -> str:
    """Return how many requests there were, by outcome and kind of error."""
    text = f"{figures.requests:,} requests"
    if figures.outcomes:
        text += f": {_listed(figures.outcomes)}"
    return f"{text} (errors: {_listed(figures.errors)})" if figures.errors else text


def _listed(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(numbers.items()))


def limits_by_class(slo_of: Mapping[str, Slo]) -> str:
    """Return the limits of all classes in words: once where they are the same; empty: there are none."""
    labels = {"ttft_ms": "TTFT", "itl_ms": "mean ITL", "e2e_ms": "E2E"}
    said = {
        name: ", ".join(f"{labels[key]} at most {limit:g} ms" for key, limit in slo if limit is not None)
        for name, slo in slo_of.items()
    }
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{name}: {text}" for name, text in said.items() if text)


def report_page(result: LoadResult) -> str:
    """Return the page of one load test."""
    good, said = verdict(result)
    figures, by_class, kept = result.figures, list(result.by_class.items()), limits_by_class(result.slo_of)
    sections = [Section(text=said, verdict=good)]
    sections += [Section(text=text, verdict=False) for text in _reservations(result)]
    if few := few_samples({label.removesuffix(", ms"): getattr(figures, name) for label, name in _QUANTITIES.items()}):
        sections.append(Section(text=f"{few}."))
    goodput = "There are no limits (slo), and so no goodput."
    if kept:
        goodput = f"Goodput counts requests within the limits: {kept}."
    start = "They count from sending."
    if result.scenario.open:
        start = "They count from the time at which a request was scheduled; what the client sent late is in them."
    heading = "In the measured window" if result.steady else "In the ramp-up"
    sections += [
        Section(heading, f"{counts(figures)}. {goodput}", _fact_rows(figures)),
        Section("Latencies", f"{EXCLUDED} {start}", _distribution_rows(figures)),
        Section("Throughput and running requests", plot=_course(result)),
    ]
    if any(one.completed for one in result.records):
        text = "Share of samples that are at or below a value."
        sections.append(Section("Distributions", text, plot=_distributions(result)))
        sections.append(Section("Latency over time", plot=_latencies(result)))
    if len(by_class) > 1:
        sections.append(Section("Classes", table=_rate_rows(by_class)))
        sections += [Section(f"Latencies of {name}", table=_distribution_rows(one)) for name, one in by_class]
    sections.append(Section("How requests ended", table=_outcome_rows([*by_class, ("all", figures)])))
    if len(result.scenario.phases) > 1:
        text = "Each phase by itself, steady or not: requests that started in it, tokens that arrived in it."
        sections.append(Section("Phases", text, _rate_rows(result.by_phase)))
    loop, (begin, end) = "Open loop" if result.scenario.open else "Closed loop", result.window
    how = f"{loop} over {result.transport}, seed {result.seed}; measured from {begin:.1f} to {end:.1f} s."
    lead = f"{result.scenario.description.strip()} {how}".strip()
    return render_page(f"Load test: {result.scenario.name}", lead, sections, source_line(result.command))


def _reservations(result: LoadResult) -> list[str]:
    """Return what stands against taking the result for that of a whole test."""
    lines = []
    if result.interrupted:
        why = f": {result.fault}" if result.fault else ""
        lines.append(f"The test was interrupted{why}; this is what was measured until then.")
    if not result.steady:
        lines.append("It ended in the ramp-up, before the measured window: the figures are not those of a steady load.")
    return lines


def _fact_rows(figures: Figures) -> list[Row]:
    """Return the rates of a window, a row each."""
    facts = {
        "requests/s": significant(figures.requests_per_second),
        "output tokens/s": significant(figures.output_tokens_per_second),
        "input tokens/s": significant(figures.input_tokens_per_second),
        "total tokens/s": significant(figures.total_tokens_per_second),
        "goodput, requests/s": significant(figures.goodput),
        "requests within the limits": _percent(figures.slo_attainment),
        "prompt tokens from the prefix cache": _percent(figures.cached_share),
    }
    return [{"": name, " ": value} for name, value in facts.items() if value is not None]


def _distribution_rows(figures: Figures) -> list[Row]:
    """Return a row per quantity with its percentiles."""
    named = {label: getattr(figures, name) for label, name in _QUANTITIES.items()}
    return [
        {"": label, "samples": one.count}
        | {name: round(getattr(one, name), 2) for name in ("mean", "p50", "p90", "p95", "p99", "max")}
        for label, one in named.items()
        if one is not None
    ]


def _rate_rows(named: Sequence[tuple[str, Figures]]) -> list[Row]:
    """Return a row of rates and percentiles per class or phase."""
    return [
        {
            "": name,
            "requests": figures.requests,
            "requests/s": significant(figures.requests_per_second),
            "goodput": significant(figures.goodput),
            "within limits": _percent(figures.slo_attainment),
            "output tokens/s": significant(figures.output_tokens_per_second),
            "cached": _percent(figures.cached_share),
        }
        | {column: _percentile(figures, *column.split()) for column in _RATES}
        for name, figures in named
    ]


def _percentile(figures: Figures, label: str, which: str) -> float | None:
    one: Distribution | None = getattr(figures, f"{label.lower()}_ms")
    return None if one is None else significant(getattr(one, which))


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _outcome_rows(named: Sequence[tuple[str, Figures]]) -> list[Row]:
    """Return a row per class with the number of requests of each outcome and kind of error."""
    outcomes = sorted({outcome for _, figures in named for outcome in figures.outcomes})
    errors = sorted({error for _, figures in named for error in figures.errors})
    return [
        {"": name, "requests": figures.requests}
        | {outcome: figures.outcomes.get(outcome, 0) for outcome in outcomes}
        | {f"error: {error}": figures.errors.get(error, 0) for error in errors}
        for name, figures in named
    ]


def _course(result: LoadResult) -> Panels:
    """Return throughput and running requests over time."""
    end = max(one.ended_s for one in result.records)
    edges = np.linspace(0, end, int(np.clip(end, 20, 120)) + 1)
    arrivals = [arrival for one in result.records for arrival in one.arrivals]
    tokens, _ = np.histogram([one.time_s for one in arrivals], edges, weights=[one.tokens for one in arrivals])
    sent = np.array([one.sent_s for one in result.records])
    lasted = np.array([one.ended_s for one in result.records]) - sent
    running = np.diff([np.clip(edge - sent, 0, lasted).sum() for edge in edges])
    panels: list[Panel] = []
    for label, amounts, colour in (("output tokens/s", tokens, BLUE), ("running requests", running, ORANGE)):
        rates = amounts / np.diff(edges)
        line = Line(edges, [*rates, rates[-1]], colour, shape="steps")
        panels.append(_over_time(result, "seconds", label, [line], end))
    return Panels(panels, height=4.6, stacked=True)


def _over_time(result: LoadResult, x_label: str, y_label: str, lines: Sequence[Line], end: float) -> Panel:
    """Return a panel with the measured window shaded and the phases' borders marked."""
    borders = [Mark(begin, colour=FRAME, style=":") for begin in starts(result.scenario.phases)[1:-1]]
    window = (*result.window, "measured window" if result.steady else "ramp-up")
    return Panel(x_label, y_label, lines, borders, window, x_limits=(0, end))


def _distributions(result: LoadResult) -> Panels:
    """Return the cumulative distributions of the completed requests of the window, by class."""
    begin, end = result.window
    panels: list[Panel] = []
    for label in ("TTFT, ms", "ITL per token, ms", "E2E, ms"):
        samples_of, lines = LATENCIES[_QUANTITIES[label]], []
        for name, colour, done in _completed_by_class(result):
            values = np.sort([1000 * value for one in done if begin <= one.start_s < end for value in samples_of(one)])
            shares = np.arange(1, len(values) + 1) / max(len(values), 1)
            lines.append(Line(values, shares, colour, name, shape="steps"))
        panels.append(Panel(label, "" if panels else "share of samples", lines, y_limits=(0, 1.02)))
    return Panels(panels)


def _latencies(result: LoadResult) -> Panels:
    """Return TTFT and E2E of each completed request at the time of its start, also outside of the window."""
    end, x_label, classes = max(result.load_ended_s, result.window[1]), "seconds: start of the request", []
    for name, colour, done in _completed_by_class(result):
        shown = [(one.start_s, one.ttft_s, one.e2e_s) for one in done if one.ttft_s is not None]
        starts, *latencies = 1000 * np.array(shown).reshape(-1, 3).T
        classes.append([Line(starts / 1000, ms, colour, name, "points", ".") for ms in latencies])
    clouds = zip(("TTFT, ms", "E2E, ms"), zip(*classes, strict=True), strict=True)
    panels = [_over_time(result, x_label, label, lines, end) for label, lines in clouds]
    return Panels(panels, height=4.6, stacked=True)


def _completed_by_class(result: LoadResult) -> list[tuple[str, str, list[RequestRecord]]]:
    """Return each class's name for the legend, which a single one does not need, its colour and completed requests."""
    names = list(result.slo_of)
    return [
        (
            name if len(names) > 1 else "",
            COLOURS[number % len(COLOURS)],
            [one for one in result.records if one.class_name == name and one.completed],
        )
        for number, name in enumerate(names)
    ]
