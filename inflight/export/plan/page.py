"""Plans as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.export.plan.calibration import Comparison
from inflight.export.plan.charts import comparison_figure, curve_figure, memory_figure, price_figure
from inflight.export.plan.ranking import Ranking
from inflight.export.plan.result import Plan
from inflight.export.plan.rows import comparison_rows, curve_rows, ranking_rows, summary
from inflight.report.page import Section, render_page


def plan_page(
    model: str, plans: Sequence[Plan], ranking: Ranking, comparisons: Sequence[Comparison], footer: str
) -> str:
    """Return the page of one model's plans.

    Args:
        model: its name.
        plans: one or more, for the same request.
        ranking: of all GPUs.
        comparisons: measured steps beside predicted ones; empty: nothing was measured.
        footer: where measurements come from.
    """
    sections = [_verdict(plan) for plan in plans]
    sections.append(Section("Memory of one GPU", figure=memory_figure(plans)))
    sections += [Section(f"The plan: {plan.gpu.title}", table=_facts(plan)) for plan in plans]
    predicted = [plan for plan in plans if plan.predicted]
    if predicted:
        sections += _speeds(predicted)
    if comparisons:
        sections.append(_checked(comparisons))
    sections += _ranked(ranking)
    return render_page(f"Plan: {model}", _lead(plans[0]), sections, footer)


def _speeds(plans: Sequence[Plan]) -> list[Section]:
    return [
        Section(
            "Throughput and latency",
            "Steady states of one replica under a load of the mean lengths, a point for each batch size"
            f"{', which stands beside it' if len(plans) == 1 else ' of the tables below'}."
            f"{' A star is the rate that was asked for.' * (plans[0].request.rate is not None)} "
            "TTFT is that of a P95 prompt.",
            figure=curve_figure(plans),
        ),
        *(Section(f"Steady states: {plan.gpu.name}", table=curve_rows(plan)) for plan in plans),
    ]


def _lead(plan: Plan) -> str:
    request = plan.request
    parts = [
        f"{request.input_tokens:,} prompt tokens and {request.output_tokens:,} answer tokens in the mean, "
        f"{request.longest:,} together at P95"
    ]
    if request.cache_hit_rate:
        parts.append(f"{request.cache_hit_rate:.0%} of the prompt tokens from the prefix cache")
    if request.rate is not None:
        parts.append(f"{request.rate:g} requests/s")
    for name, value in (("TTFT", request.slo_ttft_ms), ("ITL", request.slo_itl_ms)):
        if value is not None:
            parts.append(f"{name} at most {value:g} ms")
    return "; ".join(parts) + "."


def _verdict(plan: Plan) -> Section:
    fleet, size = plan.fleet, plan.tensor_parallel_size * plan.pipeline_parallel_size
    group = "" if plan.gpu.is_cpu else f" on {size} GPU{'s' * (size != 1)} per replica"
    what = f"{plan.gpu.name}: {plan.precision} with a {plan.kv_cache} KV cache{group}"
    if not plan.predicted:
        return Section(text=f"{what}; its memory is planned, its speed is not predicted.", verdict=True)
    if plan.request.rate is None:
        return Section(text=f"{what}, up to {plan.capacity.tokens_per_second:,.4g} tokens/s.", verdict=True)
    if fleet.saturated:
        return Section(text=f"{what}; the GPUs at hand cannot hold {plan.request.rate:g} requests/s.", verdict=False)
    replicas = f"{fleet.replicas} replica{'s' * (fleet.replicas != 1)}"
    return Section(text=f"{what}; {replicas} for {plan.request.rate:g} requests/s.", verdict=True)


def _facts(plan: Plan) -> list[dict[str, object]]:
    return [{"": name, " ": text} for name, text in summary(plan)]


def _checked(comparisons: Sequence[Comparison]) -> Section:
    decodes = [one for one in comparisons if not one.row.prompt_tokens]
    worst = max(abs(one.error) for one in decodes)
    return Section(
        "Measured on this machine",
        f"Decode throughput is predicted within {worst:.0%} of what was measured, at every number of streams.",
        table=comparison_rows(comparisons),
        figure=comparison_figure(comparisons),
    )


def _ranked(ranking: Ranking) -> list[Section]:
    sections = []
    if ranking.plans:
        text = "Prices per GPU hour are assumptions, dated in build/gpus.toml, but for --price."
        sections.append(Section("GPUs by price", text, ranking_rows(ranking), price_figure(ranking)))
    if ranking.refused:
        rows = [{"GPU": name, "reason": reason} for name, reason in ranking.refused]
        sections.append(Section("GPUs that cannot serve this", table=rows))
    return sections
