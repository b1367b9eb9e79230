"""A result in words and rows: for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.load.measurements import Distribution, Figures
from inflight.load.overhead import CPU_LIMIT, LAG_LIMIT_MS, SEND_DELAY_LIMIT_MS
from inflight.load.result import LoadResult
from inflight.load.scenario import Slo

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


def verdict(result: LoadResult) -> tuple[bool, str]:
    """Return whether the figures are the server's and not the client's, and a sentence about it."""
    client = result.client
    if client.bottleneck:
        return False, f"The client was a bottleneck: {'; '.join(client.reasons)}. Figures may be its own."
    lag, share = client.loop_lag_ms, client.cpu_share
    parts = [
        "" if lag is None else f"event loop lag {lag.p99:.1f} ms at the 99th percentile (limit: {LAG_LIMIT_MS:g})",
        "" if share is None else f"{share:.0%} of a core (limit: {CPU_LIMIT:.0%})",
        ""
        if client.send_delay_ms is None
        else f"sends {client.send_delay_ms.p99:.1f} ms late at the 99th percentile (limit: {SEND_DELAY_LIMIT_MS:g})",
    ]
    said = "; ".join(part for part in parts if part)
    if not said:
        return False, "The client's own share is unknown: the measured window was too short for a sample."
    return True, f"The client kept up: {said}."


def headline(result: LoadResult) -> list[str]:
    """Return the figures that matter most, a line each."""
    figures = result.figures()
    begin, end = figures.window_s
    lines = [
        f"{result.scenario.name}: {counts(figures)} in {window_name(result)} from {begin:.1f} to {end:.1f} s",
        f"  {figures.requests_per_second:.2f} requests/s, {figures.output_tokens_per_second:,.0f} output tokens/s, "
        f"{figures.input_tokens_per_second:,.0f} input tokens/s",
    ]
    for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms")):
        one: Distribution | None = getattr(figures, name)
        if one is not None:
            lines.append(
                f"  {label:4} ms  p50 {one.p50:,.1f}  p95 {one.p95:,.1f}  p99 {one.p99:,.1f}  max {one.max:,.1f}"
            )
    if figures.goodput is not None:
        share = "" if figures.slo_attainment is None else f" ({figures.slo_attainment:.1%} of the requests)"
        lines.append(f"  goodput {figures.goodput:.2f} requests/s{share}")
    return lines


def window_name(result: LoadResult) -> str:
    """Return what the figures are about."""
    return "the window" if result.steady else "the ramp-up, which is not the measured window,"


def counts(figures: Figures) -> str:
    """Return how many requests there were, by outcome and kind of error."""
    outcomes = [f"{count:,} {name}" for name, count in sorted(figures.outcomes.items())]
    errors = [f"{count:,} {name}" for name, count in sorted(figures.errors.items())]
    ended = f": {', '.join(outcomes)}" if outcomes else ""
    failed = f" (errors: {', '.join(errors)})" if errors else ""
    return f"{figures.requests:,} requests{ended}{failed}"


def distribution_rows(figures: Figures) -> list[Row]:
    """Return a row per quantity with its percentiles."""
    named = ((label, getattr(figures, name)) for label, name in _QUANTITIES.items())
    return [_row(label, one) for label, one in named if one is not None]


def _row(label: str, one: Distribution) -> Row:
    values = {name: round(getattr(one, name), 2) for name in ("mean", "p50", "p90", "p95", "p99", "max")}
    return {"": label, "samples": one.count, **values}


def fact_rows(figures: Figures) -> list[Row]:
    """Return the rates of a window, a row each."""
    facts = {
        "requests/s": figures.requests_per_second,
        "output tokens/s": figures.output_tokens_per_second,
        "input tokens/s": figures.input_tokens_per_second,
        "total tokens/s": figures.total_tokens_per_second,
        "goodput, requests/s": figures.goodput,
        "requests within the limits": _percent(figures.slo_attainment),
        "prompt tokens from the prefix cache": _percent(figures.cached_share),
    }
    return [{"": name, " ": _rounded(value)} for name, value in facts.items() if value is not None]


def rate_rows(named: Sequence[tuple[str, Figures]]) -> list[Row]:
    """Return a row of rates and percentiles per class or phase."""
    return [{"": name, **_rates(figures)} for name, figures in named]


def _rates(figures: Figures) -> Row:
    return {
        "requests": figures.requests,
        "requests/s": _rounded(figures.requests_per_second),
        "goodput": _rounded(figures.goodput),
        "within limits": _percent(figures.slo_attainment),
        "output tokens/s": _rounded(figures.output_tokens_per_second),
        "cached": _percent(figures.cached_share),
        "TTFT p50": _percentile(figures.ttft_ms, "p50"),
        "TTFT p99": _percentile(figures.ttft_ms, "p99"),
        "ITL p50": _percentile(figures.itl_ms, "p50"),
        "ITL p99": _percentile(figures.itl_ms, "p99"),
        "E2E p99": _percentile(figures.e2e_ms, "p99"),
    }


def outcome_rows(named: Sequence[tuple[str, Figures]]) -> list[Row]:
    """Return a row per class with the number of requests of each outcome and kind of error."""
    outcomes = sorted({outcome for _, figures in named for outcome in figures.outcomes})
    errors = sorted({error for _, figures in named for error in figures.errors})
    return [
        {"": name, "requests": figures.requests}
        | {outcome: figures.outcomes.get(outcome, 0) for outcome in outcomes}
        | {f"error: {error}": figures.errors.get(error, 0) for error in errors}
        for name, figures in named
    ]


def limits(slo: Slo) -> str:
    """Return the limits of a class in words; empty: it has none."""
    pairs = (("TTFT", slo.ttft_ms), ("mean ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} at most {limit:g} ms" for name, limit in pairs if limit is not None)


def _percentile(one: Distribution | None, name: str) -> object:
    return None if one is None else _rounded(getattr(one, name))


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _rounded(value: object) -> object:
    """Return a figure to four significant digits, which is more than a load test knows."""
    return float(f"{value:.4g}") if isinstance(value, float) and abs(value) < 1000 else value
