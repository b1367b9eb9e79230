"""Holds measured quality against the deployment's thresholds, and reports it on one page.

The page has the verdict, the measurements, and the layers that cost most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inflight.export.verify.measures import KV_CACHE, LayerError, Quality
from inflight.export.verify.verifier import Measured
from inflight.report.page import Section, render_page
from inflight.report.plots import BAD, BLUE, GREY, Bars, Line, Mark, Panel, Panels
from inflight.report.table import Row
from inflight.settings.deployment import QualitySettings

_NAMED = 3
"""Layers that a failed build names."""
_CUT_OFF = 0.8
"""A range below this is named beside its layer; the largest value of other data may be a little larger."""
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


def check(quality: Quality, errors: Sequence[LayerError], limits: QualitySettings) -> list[Check]:
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
    worst = max(errors, key=lambda one: one.weight_error)
    found.append(("max_weight_error", "", worst.worst_linear, worst.weight_error))
    if ranges := [one for one in errors if one.range is not None]:
        least = min(ranges, key=lambda one: one.range or 0.0)
        where = least.range_of if least.layer in least.range_of else f"{least.layer}, {least.range_of}"
        found.append(("min_range", "", where, least.range))
    return [Check(*one, getattr(limits, one[0])) for one in found]


def shortfalls(checks: Sequence[Check]) -> list[str]:
    """Return what falls short, a text for each; nothing if nothing does."""
    found = []
    for one in (one for one in checks if not one.passes):
        where = f", in {one.quantized}" if one.name in ("max_weight_error", "min_range") else ""
        value, limit = _value(one.name, one.value), _value(one.name, one.limit)
        found.append(f"{one.name} is {value}, the limit {limit}{where}")
    return found


def dearest(errors: Sequence[LayerError], costs: Mapping[str, float]) -> list[str]:
    """Return a text for each of the layers that cost most; ``costs``: the dearest first, or none."""
    of_layer = {one.layer: one for one in errors}
    return [f"most is lost in {_named(of_layer[layer], costs[layer])}" for layer in list(costs)[:_NAMED]]


def _named(error: LayerError, saved: float) -> str:
    linear = error.worst_linear.rpartition(".")[2]
    text = f"{saved:.4f} nats; its {linear} is off by {error.weight_error:.1%}"
    if error.range is not None and error.range < _CUT_OFF:
        what = error.range_of if error.range_of == KV_CACHE else f"input of {error.range_of.rpartition('.')[2]}"
        text += f"; its {what} keeps only {error.range:.2f} of the largest value"
    return f"{error.layer}: {text}"


def quality_page(
    title: str,
    facts: Mapping[str, str],
    sizes: Mapping[str, int],
    measured: Measured,
    checks: Sequence[Check],
    costs: Mapping[str, float],
) -> str:
    """Return the page.

    ``facts`` say what was measured on what; ``sizes`` are the bytes of the original's and the quantized checkpoint's
    weights; ``costs`` are the layers', the dearest first, or none.
    """
    errors, verdict = measured.errors, shortfalls(checks)
    verdict += dearest(errors, costs) if verdict else []
    megabytes = {name: size / 1e6 for name, size in sizes.items()}
    texts = [f"{size:.2f} MB" for size in megabytes.values()]
    size_rows = [{"checkpoint": name, "weights (MB)": round(size, 2)} for name, size in megabytes.items()]
    bars = Bars("weights (MB)", list(megabytes), {"weights": list(megabytes.values())}, texts=texts)
    explained = (
        "Weights are compared with the scales that AWQ moves out of them. The range of a scale is the "
        "largest value that it keeps, as a multiple of the largest seen; below 1, values are cut off. "
    )
    explained += (
        "Each layer in turn was put back as it is in the original: the KL divergence falls by so much."
        if costs
        else "`--layer-costs` measures what restoring each layer would save; so does a build that falls short."
    )
    sections = [
        Section(text="\n".join(verdict or ["All thresholds hold."]), verdict=not verdict),
        Section("Quality", table=_check_rows(checks)),
        Section("Size", table=size_rows, plot=bars),
        Section("Divergence of each held-out example", plot=_divergences(measured.quality)),
        Section("Layers", explained, _layer_rows(errors, costs), _layers(errors, costs)),
        Section("What was measured", table=[{"what": name, "value": text} for name, text in facts.items()]),
    ]
    lead = "A quantized checkpoint beside the original, on data that calibration has not seen."
    return render_page(title, lead, sections, measured.source)


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


def _layer_rows(errors: Sequence[LayerError], costs: Mapping[str, float]) -> list[Row]:
    ordered = sorted(errors, key=lambda one: -costs.get(one.layer, one.weight_error))
    saved = "KL saved by restoring it (nats)"
    return [
        {"layer": one.layer}
        | ({saved: round(costs[one.layer], 7)} if costs else {})
        | {
            "weights differ most in": one.worst_linear,
            "by (relative norm)": round(one.weight_error, 4),
            "least range": None if one.range is None else round(one.range, 2),
            "of": one.range_of,
        }
        for one in ordered
    ]


def _divergences(quality: Quality) -> Panels:
    values = sorted(quality.kl_of_examples)
    shares = [100 * (rank + 1) / len(values) for rank in range(len(values))]
    mean = Mark(quality.kl_divergence, "mean over all positions", BAD, axis="y")
    label = "examples with at most this divergence (%)"
    return Panels([Panel(label, "KL divergence (nats)", [Line(shares, values)], [mean], log_y=True)], height=2.6)


def _layers(errors: Sequence[LayerError], costs: Mapping[str, float]) -> Panels:
    number_of = {one.layer: int(one.layer.rpartition(".")[2]) for one in errors}
    weights = Line(list(number_of.values()), [100 * one.weight_error for one in errors], GREY, shape="bars")
    lower = Panel("layer", "weight error (%)", [weights], x_limits=(None, None))
    if not costs:
        return Panels([lower], height=2.6)
    worst, *others = costs
    saved = [
        Line([number_of[layer] for layer in group], [costs[layer] for layer in group], colour, shape="bars")
        for group, colour in ((others, BLUE), ([worst], BAD))
    ]
    upper = Panel("layer", "KL saved (nats)", saved, x_limits=(None, None), y_limits=(None, None))
    return Panels([upper, lower], 4.0, stacked=True)
