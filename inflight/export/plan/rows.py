"""Plans as rows of text and numbers: what the terminal and the page both show."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.export.plan.calibration import Comparison
from inflight.export.plan.ranking import Ranking
from inflight.export.plan.result import UNPREDICTED, Plan
from inflight.export.plan.serving import Point

Row = dict[str, object]

_LIMITS = {
    "memory": "no more sequences of P95 length fit",
    "slo": "a larger batch misses an objective",
    "step": "a larger batch would need more prompt tokens per step than its budget",
    "throughput": "a larger batch brings hardly more throughput",
}


def memory_parts(plan: Plan) -> list[tuple[str, int]]:
    """Return the parts of one GPU's memory, in the order of the bar, in bytes; empty ones are left out."""
    memory = plan.memory
    parts = [
        ("weights", memory.weights),
        ("KV cache", memory.kv_cache),
        ("activations", memory.activations),
        ("runtime", memory.runtime),
        ("reserve", memory.reserve),
        ("free", memory.free),
    ]
    return [(name, size) for name, size in parts if size]


def summary(plan: Plan) -> list[tuple[str, str]]:
    """Return what a plan says, as pairs of name and text."""
    request, size = plan.request, plan.tensor_parallel_size * plan.pipeline_parallel_size
    group = (
        f"{_count(size, 'GPU')}: {plan.tensor_parallel_size} tensor x {plan.pipeline_parallel_size} pipeline parallel"
    )
    if plan.gpu.is_cpu:
        group = "this machine"
    lines = [
        ("parameters", f"{_parameters(plan)}, {plan.weight_bytes / 2**30:.2f} GiB in {plan.precision}"),
        ("one replica", group),
        (
            "KV cache",
            f"{plan.kv_cache}, {plan.memory.kv_bytes_per_token / 1024:.4g} KiB per token and GPU; "
            f"{plan.kv_cache_tokens:,} tokens in {plan.kv_cache_blocks:,} blocks",
        ),
        ("sequences that fit", f"{plan.fitting_sequences:,} of {request.longest:,} tokens (P95 prompt and answer)"),
        (
            "max_batch_size",
            f"{plan.max_batch_size:,}: {_LIMITS[plan.batch_limit] if plan.predicted else 'as for bf16'}",
        ),
        ("max_tokens_per_step", f"{plan.max_tokens_per_step:,} tokens, prefill and decode together"),
        ("max_sequence_length", f"{plan.max_sequence_length:,} tokens"),
    ]
    return lines + (_speed(plan) if plan.predicted else [("speed", UNPREDICTED)])


def _speed(plan: Plan) -> list[tuple[str, str]]:
    request, fleet = plan.request, plan.fleet
    lines = [
        ("a request alone", _latency(plan.unloaded)),
        ("one replica, full", f"{_latency(plan.capacity)}, {plan.capacity.requests_per_second:.3g} requests/s"),
    ]
    if request.rate is not None:
        lines.append((f"{request.rate:g} requests/s", _at_rate(plan)))
    if fleet.usd_per_million_tokens is not None:
        tokens = f"{fleet.usd_per_million_tokens:.3g} USD per million generated tokens"
        lines.append(("price", f"{tokens}, {fleet.usd_per_hour:.3g} USD per hour"))
    efficiency = plan.efficiency
    lines.append(
        (
            "efficiencies",
            f"{'fitted' if plan.calibrated else 'assumed'}: {efficiency.bandwidth:.0%} of the bandwidth for weights, "
            f"{efficiency.kv_bandwidth:.0%} for the KV cache, {efficiency.compute:.0%} of the peak; "
            f"{1000 * efficiency.step_overhead_s:.3g} ms per step, {1e6 * efficiency.sequence_overhead_s:.3g} us per "
            "sequence",
        )
    )
    return lines


def _at_rate(plan: Plan) -> str:
    fleet, load = plan.fleet, plan.load
    if load is None:
        return f"saturated: {_count(fleet.gpus, 'GPU')} hold{'s' * (fleet.gpus == 1)} {_most(plan):.3g}"
    replicas = f"{_count(fleet.replicas, 'replica')} on {_count(fleet.gpus, 'GPU')}"
    return f"{replicas}; each {_latency(load)}, {load.batch:.3g} sequences at once"


def _latency(point: Point) -> str:
    return (
        f"TTFT {point.ttft_ms:.3g} ms, ITL {point.itl_ms:.3g} ms, {point.tokens_per_second:,.4g} tokens/s, "
        f"bound by {point.binds}"
    )


def _most(plan: Plan) -> float:
    """Return the requests per second of all replicas, full."""
    return plan.fleet.replicas * plan.capacity.requests_per_second


def _parameters(plan: Plan) -> str:
    total = plan.parameters.total
    return f"{total / 1e9:.2f} B" if total >= 1e9 else f"{total / 1e6:.1f} M"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def curve_rows(plan: Plan) -> list[Row]:
    """Return the steady states of one replica."""
    full = plan.fitting_sequences
    return [
        {
            "batch": round(point.batch),
            "requests/s": _short(point.requests_per_second),
            "tokens/s": _short(point.tokens_per_second),
            "TTFT, ms": _short(point.ttft_ms),
            "ITL, ms": _short(point.itl_ms),
            "bound by": point.binds + ", memory full" * (point.batch >= full),
        }
        for point in plan.curve
    ]


def ranking_rows(ranking: Ranking) -> list[Row]:
    """Return the GPUs that can serve the load, cheapest first."""
    return [
        {
            "GPU": plan.gpu.name,
            "GPUs": plan.fleet.gpus,
            "replicas": plan.fleet.replicas,
            "TP x PP": f"{plan.tensor_parallel_size} x {plan.pipeline_parallel_size}",
            "batch": plan.max_batch_size,
            "TTFT, ms": _short((plan.load or plan.capacity).ttft_ms),
            "ITL, ms": _short((plan.load or plan.capacity).itl_ms),
            "tokens/s": _short(plan.fleet.replicas * (plan.load or plan.capacity).tokens_per_second),
            "USD/h": _short(plan.fleet.usd_per_hour),
            "USD/M tokens": _short(plan.fleet.usd_per_million_tokens),
        }
        for plan in ranking.plans
    ]


def comparison_rows(comparisons: Iterable[Comparison]) -> list[Row]:
    """Return measured steps beside predicted ones; the error is that of the throughput."""
    return [
        {
            "streams": one.row.streams,
            "context": one.row.context,
            "prompt": one.row.prompt_tokens,
            "measured, ms": _short(one.row.step_ms),
            "predicted, ms": _short(one.predicted_ms),
            "measured, tokens/s": _short(one.row.tokens_per_second),
            "error": f"{round(100 * one.error):+d}%",
        }
        for one in comparisons
    ]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
