"""Holds measured quality against the deployment's thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.deployment import QualitySettings
from inflight.export.verify.layers import KV_CACHE, LayerCost
from inflight.export.verify.measures import Quality

NAMED = 3
"""Layers that a failed build names."""
_CUT_OFF = 0.8
"""Below this, a range is named beside its layer: the largest value of other data may be a little larger."""


@dataclass(frozen=True)
class Check:
    """One measurement and its threshold, by the threshold's name in the deployment."""

    name: str
    original: str
    quantized: str
    value: float | None
    """None: it could not be measured, because the original gives nothing to compare with."""
    limit: float
    passes: bool


def check(quality: Quality, costs: Sequence[LayerCost], limits: QualitySettings) -> list[Check]:
    """Return every check: of the whole, and of the layer that is worst in each respect."""
    before, after = quality.perplexity
    return [
        Check(
            "max_perplexity_increase",
            f"{before:.4f}",
            f"{after:.4f}",
            quality.perplexity_increase,
            limits.max_perplexity_increase,
            quality.perplexity_increase <= limits.max_perplexity_increase,
        ),
        Check(
            "max_kl_divergence",
            "",
            f"{quality.kl_divergence:.2g} nats",
            quality.kl_divergence,
            limits.max_kl_divergence,
            quality.kl_divergence <= limits.max_kl_divergence,
        ),
        _share("min_exact_match", quality.exact, quality.asked, quality.exact_match, limits.min_exact_match),
        _share(
            "min_long_context_recall",
            quality.recalled,
            quality.recall_asked,
            quality.long_context_recall,
            limits.min_long_context_recall,
        ),
        *_layer_checks(costs, limits),
    ]


def _layer_checks(costs: Sequence[LayerCost], limits: QualitySettings) -> list[Check]:
    """Return the checks that find a damaged layer even where the others make up for it."""
    worst = max(costs, key=lambda cost: cost.weight_error)
    error, limit = worst.weight_error, limits.max_weight_error
    checks = [Check("max_weight_error", "", worst.worst_linear, error, limit, error <= limit)]
    ranges = [cost for cost in costs if cost.range is not None]
    if ranges:
        least = min(ranges, key=lambda cost: cost.range or 0.0)
        where = least.range_of if least.layer in least.range_of else f"{least.layer}, {least.range_of}"
        limit = limits.min_range
        checks.append(Check("min_range", "", where, least.range, limit, (least.range or 0.0) >= limit))
    return checks


def _share(name: str, right: tuple[int, int], asked: int, value: float | None, limit: float) -> Check:
    passes = value is None or value >= limit
    return Check(name, f"{right[0]} of {asked}", f"{right[1]} of {asked}", value, limit, passes)


def failure(checks: Sequence[Check], costs: Sequence[LayerCost]) -> str | None:
    """Return one line that says what falls short and which layers cost most; None if nothing does."""
    short = [_shortfall(one) for one in checks if not one.passes]
    if not short:
        return None
    layers = ", ".join(_named(cost) for cost in costs[:NAMED])
    return f"the quantized checkpoint falls short: {'; '.join(short)}. The layers that cost most: {layers}"


def _shortfall(one: Check) -> str:
    where = f" in {one.quantized}" if one.name in ("max_weight_error", "min_range") else ""
    return f"{one.name} is {one.limit:g} and {one.value:.4g} was measured{where}"


def _named(cost: LayerCost) -> str:
    linear = cost.worst_linear.rpartition(".")[2]
    text = f"restoring it takes {cost.kl_saved:.4f} nats off the KL divergence; its weights differ most in {linear}, "
    text += f"by {cost.weight_error:.1%}"
    if cost.range is not None and cost.range < _CUT_OFF:
        what = cost.range_of if cost.range_of == KV_CACHE else f"input of {cost.range_of.rpartition('.')[2]}"
        text += f", and its {what} keeps only {cost.range:.2f} of the largest value"
    return f"{cost.layer} ({text})"
