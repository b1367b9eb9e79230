"""A sweep in words and rows: for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.load.sweep.knee import Knee, Usable, find
from inflight.load.sweep.search import Plan
from inflight.load.sweep.step import Level

Row = dict[str, object]


def percentile(level: Level, name: str, which: str) -> float | None:
    """Return a percentile of one of the figures' distributions, the mean of a load's steps; None: no sample."""
    known = [getattr(step.figures, name) for step in level.steps if getattr(step.figures, name) is not None]
    return sum(getattr(one, which) for one in known) / len(known) if known else None


def knee_text(plan: Plan, knee: Knee, most: float) -> str:
    """Return where the knee is; ``most`` is the highest throughput, in requests per second."""
    text = (
        f"Knee at {_load(plan, knee.load)}: {knee.requests_per_second:.2f} requests/s, "
        f"{knee.output_tokens_per_second:,.0f} output tokens/s."
    )
    if not plan.open:
        return f"{text} The most that any load got is {most:.2f} requests/s."
    assert knee.above is not None, "an open loop's knee has a load above it"
    kept = "no load that was measured" if knee.below is None else f"{knee.below:.4g}"
    return f"{text} The server kept up with {kept} and not with {knee.above:.4g}."


def usable_text(plan: Plan, usable: Usable, limits: str) -> str:
    """Return which load keeps the limits."""
    broken = "" if usable.broken_at is None else f"; {usable.broken_at:.4g} broke them"
    return (
        f"{_load(plan, usable.load)} keeps {limits} for {usable.attainment:.1%} of the requests (at least "
        f"{plan.share:.0%} must): {usable.goodput:.2f} requests/s of goodput{broken}."
    )


def finding_lines(plan: Plan, levels: Sequence[Level], limits: str) -> list[str]:
    """Return what was found, a line each; ``limits`` in words."""
    findings = find(plan, levels)
    most = max((level.answered for level in levels if not level.client_bound), default=0.0)
    lines = [] if findings.knee is None else [knee_text(plan, findings.knee, most)]
    lines += [] if findings.usable is None else [usable_text(plan, findings.usable, limits)]
    return [*lines, *findings.notes]


def throughput_rows(plan: Plan, levels: Sequence[Level]) -> list[Row]:
    """Return a row per load: what came, what was answered, and how the rest ended."""
    return [_throughput(plan, level) for level in levels]


def _throughput(plan: Plan, level: Level) -> Row:
    row: Row = {"load": round(level.load, 3), "runs": len(level.tried)}
    if plan.open:
        row |= {"offered/s": round(level.offered, 2)}
    row |= {"answered/s": round(level.answered, 2)}
    if plan.open:
        row |= {"unanswered": f"{level.shortfall:.1%}", "queue/s": round(level.queue_growth, 2)}
    else:
        row |= {"power": float(f"{level.power:.4g}")}
    row |= {"tokens/s": round(level.output_tokens_per_second, 1)}
    if level.goodput is not None:
        row |= {"goodput/s": round(level.goodput, 2), "within limits": f"{level.attainment:.1%}"}
    for outcome in ("refused", "failed", "unfinished"):
        row[outcome] = sum(step.figures.outcomes.get(outcome, 0) for step in level.tried)
    return row | {"client": "too slow" if level.client_bound else "ok"}


def latency_rows(levels: Sequence[Level]) -> list[Row]:
    """Return a row per load with the percentiles of its latencies, in milliseconds."""
    return [
        {"load": round(level.load, 3)}
        | {
            f"{label} {which}": _rounded(percentile(level, name, which))
            for label, name in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
            for which in ("p50", "p95", "p99")
        }
        for level in levels
    ]


def _load(plan: Plan, load: float) -> str:
    return f"{load:.4g} sessions/s" if plan.open else f"{load:.0f} sessions at a time"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
