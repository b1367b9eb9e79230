"""The quality report: one page with the verdict, the measurements, and the layers that cost most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from inflight.export.verify.checks import Check, failure
from inflight.export.verify.layers import LayerCost
from inflight.export.verify.measures import Quality
from inflight.report.drawing import BAD, BLUE, GREY, new_figure
from inflight.report.page import Row, Section, render_page

_MEANING = {
    "max_perplexity_increase": "Perplexity of the held-out answers and texts",
    "max_kl_divergence": "KL divergence of the next token's distribution from the original's, mean over positions",
    "min_exact_match": "Answers that greedy decoding gives exactly",
    "min_long_context_recall": "Answers recalled from far back in long prompts",
    "max_weight_error": "Difference of the weights from the original's, in the linear where it is largest",
    "min_range": "Largest input, key or value that its scale keeps, as a share of the largest seen, where it is least",
}


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

    Args:
        title: which model, in which precision.
        facts: what was measured on what; name to text.
        sizes: bytes of the original's and the quantized checkpoint's weights, by name.
        quality: the measurements.
        checks: and their thresholds.
        costs: of the layers.
        source: command, commit, machine and date.
    """
    short = failure(checks, costs)
    verdict = short or "All thresholds hold."
    size_rows = [{"checkpoint": name, "weights (MB)": round(size / 1e6, 2)} for name, size in sizes.items()]
    return render_page(
        title,
        "A quantized checkpoint beside the original, on data that calibration has not seen.",
        [
            Section(text=verdict, verdict=short is None),
            Section("Quality", table=_check_rows(checks)),
            Section("Size", table=size_rows, figure=_sizes(sizes)),
            Section("Divergence of each held-out example", figure=_divergences(quality)),
            Section(
                "What each layer costs",
                "Each layer in turn is put back as it is in the original; the KL divergence falls by so much. Weights "
                "are compared with the scales that AWQ and SmoothQuant move out of them. The range of a scale "
                "is the largest value that it keeps, as a multiple of the largest seen; below 1, values are cut off.",
                _layer_rows(costs),
                _layers(costs),
            ),
            Section("What was measured", table=[{"what": name, "value": text} for name, text in facts.items()]),
        ],
        source,
    )


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


def _sizes(sizes: Mapping[str, int]) -> Figure:
    figure = new_figure(7, 0.6 + 0.4 * len(sizes))
    axes = figure.subplots()
    bars = axes.barh(list(sizes), [size / 1e6 for size in sizes.values()], color=[GREY, BLUE][: len(sizes)])
    axes.bar_label(bars, fmt="%.2f MB", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("weights (MB)")
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    return figure


def _divergences(quality: Quality) -> Figure:
    figure = new_figure(7, 2.6)
    axes = figure.subplots()
    values = sorted(quality.kl_of_examples)
    axes.plot([100 * (rank + 1) / len(values) for rank in range(len(values))], values, color=BLUE)
    axes.axhline(quality.kl_divergence, color=BAD, linewidth=1, linestyle="--")
    axes.text(1, quality.kl_divergence, "mean over all positions", color=BAD, va="bottom", fontsize=9)
    axes.set_yscale("log")
    axes.set_xlabel("examples with at most this divergence (%)")
    axes.set_ylabel("KL divergence (nats)")
    return figure


def _layers(costs: Sequence[LayerCost]) -> Figure:
    ordered = sorted(costs, key=lambda cost: int(cost.layer.rpartition(".")[2]))
    names = [cost.layer.rpartition(".")[2] for cost in ordered]
    figure = new_figure(7, 4)
    saved, errors = figure.subplots(2, 1, sharex=True)
    worst = max(cost.kl_saved for cost in costs)
    saved.bar(names, [cost.kl_saved for cost in ordered], color=[BAD if c.kl_saved == worst else BLUE for c in ordered])
    saved.set_ylabel("KL saved (nats)")
    saved.ticklabel_format(axis="y", scilimits=(-2, 3), useMathText=True)
    errors.bar(names, [100 * cost.weight_error for cost in ordered], color=GREY)
    errors.set_ylabel("weight error (%)")
    errors.set_xlabel("layer")
    for axes in (saved, errors):
        axes.grid(axis="x", visible=False)
    return figure
