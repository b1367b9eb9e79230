"""Which layers a quantization costs most: by their weights, and by what restoring them would save."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inflight.engine.models.layers import RmsNorm
from inflight.engine.quant.formats import E2M1_MAX, E4M3_MAX
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

KV_CACHE = "KV cache"
_LARGEST_CODE = {
    "FP8": E4M3_MAX,
    "W4A8_AWQ": E4M3_MAX,
    "NVFP4": E4M3_MAX * E2M1_MAX,
    "W8A8_SQ_PER_CHANNEL": 127.0,
}
"""The largest multiple of ``input_scale`` that an input keeps, by scheme."""


@dataclass(frozen=True)
class LayerCost:
    """What one decoder layer lost."""

    layer: str
    kl_saved: float
    """How much smaller the KL divergence is, in nats, with this layer as in the original."""
    worst_linear: str
    weight_error: float
    """Of the worst linear: the norm of the difference from the original's weight, relative to that weight's norm."""
    range: float | None
    """The largest input, key or value that its scale keeps, as a multiple of the largest seen, where that is least:
    below 1, values are cut off. None: nothing but weights is quantized."""
    range_of: str
    """The linear whose inputs, or ``KV cache``."""


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
    ranges = _input_ranges(quantized, probes)
    whole, costs = divergence(), []
    for index, layer in enumerate(tracked(_layers(quantized), "finding the layers that cost most", progress)):
        restored = quantized.replaced({layer: original.model.get_submodule(layer)})
        with restored, quantized.rescaled(index, keys[index] / E4M3_MAX, values[index] / E4M3_MAX):
            saved = whole - divergence()
        worst = max((name for name in errors if name.startswith(f"{layer}.")), key=errors.__getitem__)
        own = {name: value for name, value in ranges.items() if name.startswith(f"{layer}.")}
        if (scales := quantized.kv_scales) is not None:
            kept = min(scales.keys[index] / keys[index], scales.values[index] / values[index])
            own[KV_CACHE] = E4M3_MAX * float(kept)
        narrowest = min(own, key=own.__getitem__, default="")
        costs.append(LayerCost(layer, saved, worst, errors[worst], own.get(narrowest), narrowest))
    return sorted(costs, key=lambda cost: -cost.kl_saved)


def _input_ranges(scorer: Scorer, probes: Sequence[Example]) -> dict[str, float]:
    """Return for each linear that rounds its inputs the largest one it keeps, as a multiple of the largest it got."""
    largest: dict[str, float] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            smoothed = inputs[0] if linear.pre_quant_scale is None else inputs[0] * linear.pre_quant_scale
            largest[name] = max(largest.get(name, 0.0), float(smoothed.abs().max()))

        return note

    rounding = {name: one for name, one in scorer.linears.items() if getattr(one, "input_scale", None) is not None}
    hooks = [one.register_forward_pre_hook(watch(name)) for name, one in rounding.items()]
    try:
        for example in probes:
            scorer.logits(example.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: float(one.input_scale) * _LARGEST_CODE[one.quant_algo] / largest[name]
        for name, one in rounding.items()
        if largest[name]  # nothing is cut off where nothing comes in
    }


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
