"""Plans for people: the lines and tables in the terminal, and the HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inflight.export.plan.calibration import Comparison
from inflight.export.plan.plan import Plan, PlanRequest, Point
from inflight.export.plan.roofline import AS_MEASURED
from inflight.report.page import Section, render_page
from inflight.report.plots import BAD, BLUE, COLOURS, GREEN, GREY, GRID, PURPLE, YELLOW, Bars, Line, Mark, Panel, Panels
from inflight.report.table import Row, figure, print_table
from inflight.report.units import significant

_LIMITS = {
    "memory": "no more sequences of that length fit",
    "slo": "a larger batch misses an objective",
    "step": "a larger batch would need more prompt tokens per step than its budget",
    "throughput": "a larger batch brings hardly more throughput",
    "default": "as many as the engine runs without a plan; more bring hardly more throughput",
}
_MEANS = "longer ones than the mean are left out of account: say how long they are by --p95-input and --p95-output"
_PARTS = {
    "weights": (BLUE, "█"),
    "KV cache": (GREEN, "▓"),
    "activations": (YELLOW, "▒"),
    "runtime": (PURPLE, "▚"),
    "reserve": (GREY, "░"),
    "free": (GRID, "·"),
}
"""The parts of a GPU's memory in the order of the bar, each with its colour and its character in the terminal."""
_BAR_WIDTH = 72


@dataclass(frozen=True)
class Answer:
    """What ``inflight plan`` says of one model."""

    model: str
    plans: Sequence[Plan]
    """One or more, for the same request."""
    ranked: Sequence[Plan]
    """The plans of all GPUs by their price."""
    refused: Mapping[str, str]
    """Why the other GPUs have no plan, by name."""
    comparisons: Sequence[Comparison]
    """Measured steps beside predicted ones; empty: nothing was measured."""
    source: str
    """Where measurements come from."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "model": self.model,
            "plans": [plan.as_dict() for plan in self.plans],
            "ranking": [plan.as_dict() for plan in self.ranked],
            "refused": self.refused,
            "check": [
                one.row.model_dump() | {"predicted_ms": round(one.predicted_ms, 4), "error": round(one.error, 4)}
                for one in self.comparisons
            ],
        }


def show_plans(answer: Answer) -> None:
    """Print plans, measured steps beside predicted ones where there are any, and the GPUs by price."""
    console = Console(width=max(Console().width, 110), highlight=False)
    for plan in answer.plans:
        console.print(Text.assemble("\n", (plan.gpu.title, "bold"), f"  ({plan.memory.total / 2**30:.1f} GiB)"))
        console.print(_memory_bar(plan))
        facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column()
        for pair in summary(plan).items():
            facts.add_row(*map(Text, pair))
        console.print(facts)
        if plan.predicted:
            print_table("Steady states of one replica", _curve_rows(plan))
    if answer.comparisons:
        print_table("Measured and predicted; the error is the throughput's", _comparison_rows(answer.comparisons))
    if answer.ranked:
        print_table("GPUs by price (assumptions of build/gpus.toml, but for --price)", _ranking_rows(answer.ranked))
    for name, reason in answer.refused.items():
        console.print(Text.assemble((f"{name:>11}", "dim"), f"  {reason}"))


def _memory_bar(plan: Plan) -> Text:
    """Return one GPU's memory as a bar of text, with a legend below it; every part that exists has a character."""
    parts = {name: size for name, size in _parts(plan).items() if size}
    widths = {name: max(1, round(_BAR_WIDTH * size / sum(parts.values()))) for name, size in parts.items()}
    widths[max(widths, key=lambda name: widths[name])] += _BAR_WIDTH - sum(widths.values())
    bar, legend = Text(), Text()
    for index, (name, size) in enumerate(parts.items()):
        colour, character = _PARTS[name]
        bar.append(character * widths[name], style=colour)
        legend.append("\n" if index % 3 == 0 else "   ")
        legend.append(character * 2, style=colour)
        legend.append(f" {name} {size / 2**30:.2f} GiB")
    return bar + legend


def _parts(plan: Plan) -> dict[str, int]:
    """Return the bytes of each part of one GPU's memory."""
    return {name: getattr(plan.memory, name.lower().replace(" ", "_")) for name in _PARTS}


def summary(plan: Plan) -> dict[str, str]:
    """Return what a plan says, text by name."""
    request, total = plan.request, plan.parameters.total
    tensor, pipeline = plan.tensor_parallel_size, plan.pipeline_parallel_size
    parameters = f"{total / 1e9:.2f} B" if total >= 1e9 else f"{total / 1e6:.1f} M"
    group = f"{_count(tensor * pipeline, 'GPU')}: {tensor} tensor x {pipeline} pipeline parallel"
    prompt, answer = request.tail
    texts = {
        "parameters": f"{parameters}, {plan.weight_bytes / 2**30:.2f} GiB in {plan.precision}",
        "one replica": "this machine" if plan.gpu.is_cpu else group,
        "KV cache": f"{plan.kv_cache}, {plan.memory.kv_bytes_per_token / 1024:.4g} KiB per token and GPU; "
        f"{plan.kv_cache_tokens:,} tokens in {plan.kv_cache_blocks:,} blocks",
        "sequences that fit": f"{plan.fitting_sequences:,} of {request.longest:,} tokens "
        f"({prompt} prompt, {answer} answer)",
        "max_batch_size": f"{plan.max_batch_size:,}: {_LIMITS[plan.batch_limit] if plan.predicted else 'as for bf16'}",
        "max_tokens_per_step": f"{plan.max_tokens_per_step:,} tokens, prefill and decode together",
        "max_sequence_length": f"{plan.max_sequence_length:,} tokens",
    }
    if "mean" in request.tail:
        texts["lengths"] = _MEANS
    return texts | (_speeds(plan) if plan.predicted else {"speed": plan.speed})


def _speeds(plan: Plan) -> dict[str, str]:
    request, fleet, efficiency = plan.request, plan.fleet, plan.efficiency
    texts = {
        "a request alone": _speed(plan.unloaded),
        **({} if plan.full is None else {f"{plan.max_batch_size} clients, each asks again": _speed(plan.full)}),
        "one replica, full": f"{_speed(plan.capacity)}, {plan.capacity.requests_per_second:.3g} requests/s",
    }
    gpus = _count(fleet.gpus, "GPU")
    if plan.load is not None:
        each = f"{_speed(plan.load)}, {plan.load.batch:.3g} sequences at once"
        texts[f"{request.rate:g} requests/s"] = f"{_count(fleet.replicas, 'replica')} on {gpus}; each {each}"
    elif request.rate is not None:
        most = fleet.replicas * plan.capacity.requests_per_second
        texts[f"{request.rate:g} requests/s"] = f"saturated: {gpus} hold{'s' * (fleet.gpus == 1)} {most:.3g}"
    if fleet.usd_per_million_tokens is not None:
        tokens = f"{fleet.usd_per_million_tokens:.3g} USD per million generated tokens"
        texts["price"] = f"{tokens}, {fleet.usd_per_hour:.3g} USD per hour"
    if plan.efficiency == AS_MEASURED:
        return texts | {"efficiencies": "each product's, as the kernels were measured on this machine"}
    texts["efficiencies"] = (
        f"{'fitted' if plan.calibrated else 'assumed'}: {efficiency.bandwidth:.0%} of the bandwidth for weights, "
        f"{efficiency.kv_bandwidth:.0%} for the KV cache, {efficiency.compute:.0%} of the peak; "
        f"{1000 * efficiency.step_overhead_s:.3g} ms per step, {1e6 * efficiency.sequence_overhead_s:.3g} us per "
        "sequence"
    )
    return texts


def _speed(point: Point) -> str:
    return (
        f"TTFT {point.ttft_ms:.3g} ms, ITL {point.itl_ms:.3g} ms, {figure(point.tokens_per_second)} tokens/s, "
        f"bound by {point.binds}"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _curve_rows(plan: Plan) -> list[Row]:
    return [
        {
            "batch": round(point.batch),
            "requests/s": significant(point.requests_per_second),
            "tokens/s": significant(point.tokens_per_second),
            "TTFT, ms": significant(point.ttft_ms),
            "ITL, ms": significant(point.itl_ms),
            "bound by": point.binds + ", memory full" * (point.batch >= plan.fitting_sequences),
        }
        for point in plan.curve
    ]


def _ranking_rows(ranked: Sequence[Plan]) -> list[Row]:
    return [
        {
            "GPU": plan.gpu.name,
            "GPUs": plan.fleet.gpus,
            "replicas": plan.fleet.replicas,
            "TP x PP": f"{plan.tensor_parallel_size} x {plan.pipeline_parallel_size}",
            "batch": plan.max_batch_size,
            "TTFT, ms": significant(point.ttft_ms),
            "ITL, ms": significant(point.itl_ms),
            "tokens/s": significant(plan.fleet.replicas * point.tokens_per_second),
            "USD/h": significant(plan.fleet.usd_per_hour),
            "USD/M tokens": significant(plan.fleet.usd_per_million_tokens),
        }
        for plan, point in ((plan, plan.load or plan.capacity) for plan in ranked)
    ]


def _comparison_rows(comparisons: Sequence[Comparison]) -> list[Row]:
    return [
        {
            "streams": one.row.streams,
            "context": one.row.context,
            "prompt": one.row.prompt_tokens,
            "measured, ms": significant(one.row.step_ms),
            "predicted, ms": significant(one.predicted_ms),
            "measured, tokens/s": significant(one.row.tokens_per_second),
            "error": f"{round(100 * one.error):+d}%",
        }
        for one in comparisons
    ]


def plan_page(answer: Answer) -> str:
    """Return the page of one model's plans."""
    plans, ranked, comparisons = answer.plans, answer.ranked, answer.comparisons
    predicted = [plan for plan in plans if plan.predicted]
    parts = {name: [_parts(plan)[name] / 2**30 for plan in plans] for name in _PARTS}
    colours = {name: colour for name, (colour, _) in _PARTS.items()}
    memory = Bars("memory of one GPU, GiB", [plan.gpu.name for plan in plans], parts, colours)
    sections = [_verdict(plan) for plan in plans]
    sections.append(Section("Memory of one GPU", plot=memory))
    for plan in plans:
        facts = [{"": name, " ": text} for name, text in summary(plan).items()]
        sections.append(Section(f"The plan: {plan.gpu.title}", table=facts))
    if predicted:
        text = (
            "Steady states of one replica under a load of the mean lengths, a point for each batch size"
            f"{', which stands beside it' if len(predicted) == 1 else ' of the tables below'}."
            f"{' A star is the rate that was asked for.' * (predicted[0].request.rate is not None)} "
            f"TTFT is that of a {predicted[0].request.tail[0]} prompt."
        )
        sections.append(Section("Throughput and latency", text, plot=_curves(predicted)))
        sections += [Section(f"Steady states: {plan.gpu.name}", table=_curve_rows(plan)) for plan in predicted]
    if comparisons:
        errors = [abs(one.error) for one in comparisons if not one.row.prompt_tokens]
        text = (
            f"Decode throughput is predicted within {max(errors):.0%} of what was measured, at every number of streams."
            if errors
            else "Only prompts were measured."
        )
        rows = _comparison_rows(comparisons)
        sections.append(Section("Measured on this machine", text, rows, _measured(comparisons)))
    if ranked:
        text = "Prices per GPU hour are assumptions, dated in build/gpus.toml, but for --price."
        sections.append(Section("GPUs by price", text, _ranking_rows(ranked), _prices(ranked)))
    if answer.refused:
        refused = [{"GPU": name, "reason": reason} for name, reason in answer.refused.items()]
        sections.append(Section("GPUs that cannot serve this", table=refused))
    return render_page(f"Plan: {answer.model}", _lead(plans[0].request), sections, answer.source)


def _lead(request: PlanRequest) -> str:
    parts = [f"{request.input_tokens:,} prompt tokens and {request.output_tokens:,} answer tokens in the mean"]
    if request.tail == ("mean", "mean"):
        parts.append(_MEANS)
    else:
        parts.append("{} prompt, {} answer: {:,} tokens together".format(*request.tail, request.longest))
    if request.cache_hit_rate:
        parts.append(f"{request.cache_hit_rate:.0%} of the prompt tokens from the prefix cache")
    if request.rate is not None:
        parts.append(f"{request.rate:g} requests/s")
    for name, value in (("TTFT", request.slo_ttft_ms), ("ITL", request.slo_itl_ms)):
        if value is not None:
            parts.append(f"{name} at most {value:g} ms")
    return "; ".join(parts) + "."


def _verdict(plan: Plan) -> Section:
    rate = plan.request.rate
    group = "" if plan.gpu.is_cpu else f" on {_count(plan.gpus_per_replica, 'GPU')} per replica"
    what = f"{plan.gpu.name}: {plan.precision} with a {plan.kv_cache} KV cache{group}"
    if not plan.predicted:
        text = f"{what}; its memory is planned, its speed is not predicted."
    elif rate is None:
        text = f"{what}, up to {figure(plan.capacity.tokens_per_second)} tokens/s."
    elif plan.fleet.saturated:
        return Section(text=f"{what}; the GPUs at hand cannot hold {rate:g} requests/s.", verdict=False)
    else:
        text = f"{what}; {_count(plan.fleet.replicas, 'replica')} for {rate:g} requests/s."
    return Section(text=text, verdict=True)


def _curves(plans: Sequence[Plan]) -> Panels:
    """Return throughput against ITL and against TTFT, of one replica each, with the objectives as lines."""
    request, panels = plans[0].request, []
    for name, objective in (("ITL", request.slo_itl_ms), ("TTFT", request.slo_ttft_ms)):
        attribute, lines = f"{name.lower()}_ms", []
        for number, plan in enumerate(plans):
            colour = COLOURS[number % len(COLOURS)]
            rates = [point.tokens_per_second for point in plan.curve]
            times = [getattr(point, attribute) for point in plan.curve]
            labels = [f"{point.batch:.0f}" for point in plan.curve] if len(plans) == 1 else []
            lines.append(Line(rates, times, colour, plan.gpu.name, marker="o", labels=labels))
            if (load := plan.load) is not None:
                lines.append(Line([load.tokens_per_second], [getattr(load, attribute)], colour, marker="*"))
        marks = [] if objective is None else [Mark(objective, "objective", BAD, axis="y")]
        panels.append(Panel("tokens/s of one replica", f"{name}, ms", lines, marks))
    return Panels(panels)


def _prices(plans: Sequence[Plan]) -> Bars:
    hourly = plans[0].request.rate is not None
    texts = [f"{plan.price:.3g} USD, {_count(plan.fleet.gpus, 'GPU')}" for plan in plans]
    label = "USD per hour for the whole load" if hourly else "USD per million generated tokens, fully used"
    return Bars(label, [plan.gpu.name for plan in plans], {"price": [plan.price for plan in plans]}, texts=texts)


def _measured(comparisons: Sequence[Comparison]) -> Panels:
    """Return measured points on the predicted curves: decode throughput against ITL, and prompts against their time."""
    colours, decodes, prompts = iter(COLOURS), [], []
    ordered = sorted(comparisons, key=lambda one: (one.row.context, one.row.streams))
    for context, group in groupby((one for one in ordered if not one.row.prompt_tokens), lambda one: one.row.context):
        rows = list(group)
        times = [one.predicted_ms for one in rows]
        rates = [1000 * one.row.streams / one.predicted_ms for one in rows]
        colour, labels = next(colours), [str(one.row.streams) for one in rows]
        decodes.append(Line(rates, times, colour, f"predicted, context {context}"))
        rates, times = [one.row.tokens_per_second for one in rows], [one.row.step_ms for one in rows]
        decodes.append(Line(rates, times, colour, "measured", "points", "o", labels=labels))
    ordered = sorted(comparisons, key=lambda one: (one.row.streams, one.row.prompt_tokens))
    for streams, group in groupby((one for one in ordered if one.row.prompt_tokens), lambda one: one.row.streams):
        rows = list(group)
        lengths, colour = [one.row.prompt_tokens for one in rows], next(colours)
        name = f"predicted, {streams} streams beside" if streams else "predicted, alone"
        prompts.append(Line(lengths, [one.predicted_ms * one.row.prompt_steps for one in rows], colour, name))
        times = [one.row.step_ms * one.row.prompt_steps for one in rows]
        prompts.append(Line(lengths, times, colour, "measured", "points", "o"))
    left = Panel("tokens/s, all streams", "ITL, ms (labels: streams)", decodes)
    return Panels([left, Panel("prompt tokens", "prefill, ms", prompts)])
