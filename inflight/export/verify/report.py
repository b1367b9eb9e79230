"""Holds measured quality against the deployment's thresholds, and reports it on one page.

The page has the verdict, the measurements, and the layers that cost most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight.export.verify.measures import KV_CACHE, LayerCost, Quality
from inflight.report.page import Section, render_page
from inflight.report.plots import BAD, BLUE, GREY, Bars, Line, Mark, Panel, Panels
from inflight.report.table import Row
from inflight.settings.deployment import QualitySettings

_NAMED = 3
"""Layers that a failed build names."""
_CUT_OFF = 0.8
"""A range below this is named beside its layer; the largest value of other data may be a little larger."""
_REMEDY = (
    "`--kl-budget 0.02` keeps the layers that lose most in 16 bits; on the portable engine `engine.weights: int8` "
    "rounds the original as it is loaded, with inputs scaled by the token, and loses less than static scales"
)
"""Advice that a failure ends with: int8 lost 16 % of SmolLM2's perplexity, and weights rounded at load none."""
_MEANING = {
    "max_perplexity_increase": "Perplexity of the held-out answers and texts",
    "max_kl_divergence": "KL divergence of the next token's distribution from the original's, mean over positions",
    "min_exact_match": "Answers that greedy decoding gives exactly",
    "min_long_context_recall": "Answers recalled from far back in long prompts",
    "max_weight_error": "Difference of the weights from the original's, in the linear where it is largest",
    "min_range": "Largest input, key or value that its scale keeps, as a share of the largest seen, where it is least",
}


@dataclass(frozen=True)
class Check:
    """One measurement and its threshold, by the threshold's name in the deployment."""

    name: str
    original: str
    quantized: str
    value: float | None
    """None: it could not be measured, because the original gives nothing to compare with."""
    limit: float

    @property
    def passes(self) -> bool:
        """Whether the threshold holds; it does where nothing could be measured."""
        if self.value is None:
            return True
        return self.value <= self.limit if self.name.startswith("max_") else self.value >= self.limit


def check(quality: Quality, costs: Sequence[LayerCost], limits: QualitySettings) -> list[Check]:
    """Return every check: of the whole, and of the layer that is worst in each respect."""
    before, after = quality.perplexity
    exact = [f"{right} of {quality.asked}" for right in quality.exact]
    recalled = [f"{right} of {quality.recall_asked}" for right in quality.recalled]
    found: list[tuple[str, str, str, float | None]] = [
        ("max_perplexity_increase", f"{before:.4f}", f"{after:.4f}", quality.perplexity_increase),
        ("max_kl_divergence", "", f"{quality.kl_divergence:.2g} nats", quality.kl_divergence),
        ("min_exact_match", exact[0], exact[1], quality.exact_match),
        ("min_long_context_recall", recalled[0], recalled[1], quality.long_context_recall),
    ]
    # These find a damaged layer even where the others make up for it.
    worst = max(costs, key=lambda cost: cost.weight_error)
    found.append(("max_weight_error", "", worst.worst_linear, worst.weight_error))
    if ranges := [cost for cost in costs if cost.range is not None]:
        least = min(ranges, key=lambda cost: cost.range or 0.0)
        where = least.range_of if least.layer in least.range_of else f"{least.layer}, {least.range_of}"
        found.append(("min_range", "", where, least.range))
    return [Check(*one, getattr(limits, one[0])) for one in found]


def failure(checks: Sequence[Check], costs: Sequence[LayerCost]) -> str | None:
    """Return one line that says what falls short and which layers cost most; None if nothing does."""
    short = []
    for one in checks:
        if not one.passes:
            where = f" in {one.quantized}" if one.name in ("max_weight_error", "min_range") else ""
            short.append(f"{one.name} is {one.limit:g} and {one.value:.4g} was measured{where}")
    if not short:
        return None
    first, *others = costs[:_NAMED]
    most = ", ".join((_named(first), *(cost.layer for cost in others)))
    return f"the quantized checkpoint falls short: {'; '.join(short)}. Most is lost in {most}. {_REMEDY}"


def _named(cost: LayerCost) -> str:
    linear = cost.worst_linear.rpartition(".")[2]
    text = f"restoring it takes {cost.kl_saved:.4f} nats off the KL divergence; its weights differ most in {linear}, "
    text += f"by {cost.weight_error:.1%}"
    if cost.range is not None and cost.range < _CUT_OFF:
        what = cost.range_of if cost.range_of == KV_CACHE else f"input of {cost.range_of.rpartition('.')[2]}"
        text += f", and its {what} keeps only {cost.range:.2f} of the largest value"
    return f"{cost.layer} ({text})"


def quality_page(
    title: str,
    facts: Mapping[str, str],
    sizes: Mapping[str, int],
    quality: Quality,
    checks: Sequence[Check],
    costs: Sequence[LayerCost],
    source: str,
) -> str:
    """Return the page.

    ``facts`` say what was measured on what; ``sizes`` are the bytes of the original's and the quantized checkpoint's
    weights; ``source`` is the command, commit, machine and date.
    """
    short = failure(checks, costs)
    megabytes = {name: size / 1e6 for name, size in sizes.items()}
    texts = [f"{size:.2f} MB" for size in megabytes.values()]
    size_rows = [{"checkpoint": name, "weights (MB)": round(size, 2)} for name, size in megabytes.items()]
    bars = Bars("weights (MB)", list(megabytes), {"weights": list(megabytes.values())}, texts=texts)
    explained = (
        "Each layer in turn is put back as it is in the original; the KL divergence falls by so much. Weights "
        "are compared with the scales that AWQ and SmoothQuant move out of them. The range of a scale "
        "is the largest value that it keeps, as a multiple of the largest seen; below 1, values are cut off."
    )
    sections = [
        Section(text=short or "All thresholds hold.", verdict=short is None),
        Section("Quality", table=_check_rows(checks)),
        Section("Size", table=size_rows, plot=bars),
        Section("Divergence of each held-out example", plot=_divergences(quality)),
        Section("What each layer costs", explained, _layer_rows(costs), _layers(costs)),
        Section("What was measured", table=[{"what": name, "value": text} for name, text in facts.items()]),
    ]
    lead = "A quantized checkpoint beside the original, on data that calibration has not seen."
    return render_page(title, lead, sections, source)


def _check_rows(checks: Sequence[Check]) -> list[Row]:
    return [
        {
            "measurement": _MEANING[one.name],
            "original": one.original,
            "quantized": one.quantized,
            "measured": _value(one.name, one.value),
            "threshold": _value(one.name, one.limit),
            "key of the threshold": one.name,
            "holds": one.passes,
        }
        for one in checks
    ]


def _value(name: str, value: float | None) -> str:
    """Return a measurement, or its threshold, in its unit."""
    if value is None:
        return "not measurable"
    if name == "max_kl_divergence":
        return f"{value:.2g} nats"
    return f"{value:+.2%}" if name == "max_perplexity_increase" else f"{value:.1%}"


def _layer_rows(costs: Sequence[LayerCost]) -> list[Row]:
    return [
        {
            "layer": cost.layer,
            "KL saved by restoring it (nats)": round(cost.kl_saved, 7),
            "weights differ most in": cost.worst_linear,
            "by (relative norm)": round(cost.weight_error, 4),
            "least range": None if cost.range is None else round(cost.range, 2),
            "of": cost.range_of,
        }
        for cost in costs
    ]


def _divergences(quality: Quality) -> Panels:
    values = sorted(quality.kl_of_examples)
    shares = [100 * (rank + 1) / len(values) for rank in range(len(values))]
    mean = Mark(quality.kl_divergence, "mean over all positions", BAD, axis="y")
    label = "examples with at most this divergence (%)"
    return Panels([Panel(label, "KL divergence (nats)", [Line(shares, values)], [mean], log_y=True)], height=2.6)


def _layers(costs: Sequence[LayerCost]) -> Panels:
    number_of = {cost.layer: int(cost.layer.rpartition(".")[2]) for cost in costs}
    worst = max(costs, key=lambda cost: cost.kl_saved)
    others = [cost for cost in costs if cost is not worst]
    saved = [
        Line([number_of[cost.layer] for cost in group], [cost.kl_saved for cost in group], colour, shape="bars")
        for group, colour in ((others, BLUE), ([worst], BAD))
    ]
    errors = Line(list(number_of.values()), [100 * cost.weight_error for cost in costs], GREY, shape="bars")
    upper = Panel("layer", "KL saved (nats)", saved, x_limits=(None, None), y_limits=(None, None))
    return Panels([upper, Panel("layer", "weight error (%)", [errors], x_limits=(None, None))], 4.0, stacked=True)
