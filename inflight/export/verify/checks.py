"""Holds measured quality against the deployment's thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.deployment import QualitySettings
from inflight.export.verify.layers import LayerCost
from inflight.export.verify.measures import Quality

NAMED = 3
"""Layers that a failed build names."""
CUT_OFF = 0.8
"""Below this, a cache's range is named as a fault: the largest value of other data may be a little larger."""


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


def check(quality: Quality, limits: QualitySettings) -> list[Check]:
    """Return every check."""
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
            f"{quality.kl_divergence:.6f} nats",
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
    ]


def _share(name: str, right: tuple[int, int], asked: int, value: float | None, limit: float) -> Check:
    passes = value is None or value >= limit
    return Check(name, f"{right[0]} of {asked}", f"{right[1]} of {asked}", value, limit, passes)


def failure(checks: Sequence[Check], costs: Sequence[LayerCost]) -> str | None:
    """Return one line that says what falls short and which layers cost most; None if nothing does."""
    short = [f"{one.name} is {one.limit:g} and {one.value:.4g} was measured" for one in checks if not one.passes]
    if not short:
        return None
    layers = ", ".join(_named(cost) for cost in costs[:NAMED])
    return f"the quantized checkpoint falls short: {'; '.join(short)}. The layers that cost most: {layers}"


def _named(cost: LayerCost) -> str:
    linear = cost.worst_linear.rpartition(".")[2]
    text = f"restoring it takes {cost.kl_saved:.4f} nats off the KL divergence; its weights differ most in {linear}, "
    text += f"by {cost.weight_error:.1%}"
    if cost.kv_range is not None and cost.kv_range < CUT_OFF:
        text += f", and its KV cache holds only {cost.kv_range:.2f} of the largest value"
    return f"{cost.layer} ({text})"
