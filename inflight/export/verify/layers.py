"""Which layers a quantization costs most: by their weights, and by what restoring them would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.engine.models.layers import RmsNorm
from inflight.engine.quant.formats import E4M3_MAX
from inflight.engine.scoring import Scorer
from inflight.export.data import Example
from inflight.export.progress import Progress, tracked
from inflight.export.verify.measures import kl_divergence

PROBES = 8
"""Examples that are used to find the layers; the longest ones."""
_AFTER_NORM = {
    "q_proj": ("input_layernorm",),
    "k_proj": ("input_layernorm",),
    "v_proj": ("input_layernorm",),
    "qkv_proj": ("input_layernorm",),
    "gate_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "up_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
    "gate_up_proj": ("pre_feedforward_layernorm", "post_attention_layernorm"),
}
"""The norm before a linear, Gemma's name first."""


@dataclass(frozen=True)
class LayerCost:
    """What one decoder layer lost."""

    layer: str
    kl_saved: float
    """How much smaller the KL divergence is, in nats, with this layer as in the original."""
    worst_linear: str
    weight_error: float
    """Of the worst linear: the norm of the difference from the original's weight, relative to that weight's norm."""
    kv_range: float | None
    """The largest key or value that an FP8 cache holds, as a multiple of the largest of the original: below 1, values
    are cut off. None: the cache is not quantized."""


def layer_costs(
    original: Scorer, quantized: Scorer, examples: Sequence[Example], progress: Progress
) -> list[LayerCost]:
    """Return what each decoder layer costs, the dearest first.

    A layer is put back as it is in the original, the scales of its cache too; the others stay quantized. The
    distributions are then that much closer to the original's.
    """
    probes = sorted(examples, key=lambda one: len(one.tokens), reverse=True)[:PROBES]
    expected = [original.logits(example.tokens) for example in probes]
    errors = weight_errors(original, quantized)

    def divergence() -> float:
        rows = [
            kl_divergence(before, quantized.logits(example.tokens))
            for before, example in zip(expected, probes, strict=True)
        ]
        return float(torch.cat(rows).mean())

    keys, values = _kv_ranges(original, probes)
    whole, costs = divergence(), []
    for index, layer in enumerate(tracked(_layers(quantized), "finding the layers that cost most", progress)):
        restored = quantized.replaced({layer: original.model.get_submodule(layer)})
        with restored, quantized.rescaled(index, keys[index] / E4M3_MAX, values[index] / E4M3_MAX):
            saved = whole - divergence()
        worst = max((name for name in errors if name.startswith(f"{layer}.")), key=errors.__getitem__)
        scales = quantized.kv_scales
        kv_range = None
        if scales is not None:
            kv_range = E4M3_MAX * float(min(scales.keys[index] / keys[index], scales.values[index] / values[index]))
        costs.append(LayerCost(layer, saved, worst, errors[worst], kv_range))
    return sorted(costs, key=lambda cost: -cost.kl_saved)


def _kv_ranges(scorer: Scorer, probes: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return the largest absolute key and value of each layer over all probes."""
    keys, values = zip(*(scorer.kv_ranges(example.tokens) for example in probes), strict=True)
    return torch.stack(keys).amax(0), torch.stack(values).amax(0)


def weight_errors(original: Scorer, quantized: Scorer) -> dict[str, float]:
    """Return how far each linear's weight is from the original's: ``|W' - W| / |W|``, Frobenius norms.

    AWQ and SmoothQuant move scales from the weight into the norm before it, or into the linear's input; the product of
    both is compared.
    """
    return {name: _error(original, quantized, name) for name in quantized.linears if ".layers." in name}


@torch.inference_mode()
def _error(original: Scorer, quantized: Scorer, name: str) -> float:
    expected, found = (scorer.weight(name) * _gain(scorer, name) for scorer in (original, quantized))
    return float((found - expected).norm() / expected.norm())


def _gain(scorer: Scorer, name: str) -> Tensor | float:
    """Return what a linear's inputs are multiplied by before it: ``[columns]``, or 1."""
    smoothed: Tensor | None = getattr(scorer.linears[name], "pre_quant_scale", None)
    gain = 1.0 if smoothed is None else smoothed.float()
    layer, last = scorer.model.get_submodule(".".join(name.split(".")[:3])), name.rpartition(".")[2]
    for norm in _AFTER_NORM.get(last, ()):
        if isinstance(module := getattr(layer, norm, None), RmsNorm):
            return gain * module.gain()
    return gain


def _layers(scorer: Scorer) -> list[str]:
    return [f"model.layers.{index}" for index, _ in enumerate(scorer.model.get_submodule("model.layers").children())]
