"""What gpt-oss has that other checkpoints have not, for its GGUF file: experts in MXFP4, sinks, biases, YaRN.

A block of 32 weights is one byte of their power of two and 16 of their places among E2M1's values in both files. A byte
of Hugging Face's has two neighbours, the even one in its lower bits; one of GGUF's has a weight of the block's first
half, and in its upper bits that of its second half. So each weight stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_EXPERTS = ".mlp.experts."
_PACKED = tuple(f"{name}_{kind}" for name in ("gate_up_proj", "down_proj") for kind in ("blocks", "scales", "bias"))
"""The ends of the names of their tensors."""
_NAMES = {
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
}
"""Of what has another name in GGUF than in a Llama."""


def gpt_oss_name(name: str) -> str | None:
    """Return GGUF's name of a tensor of a layer of gpt-oss; None: it is as in other models."""
    if not name.startswith("model.layers."):
        return None
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}" if part in _NAMES else None


def is_packed(name: str) -> bool:
    """Whether a tensor is of packed experts, whose biases are with them."""
    return name.endswith(_PACKED)


def packed_experts(found: Iterable[tuple[str, Array]]) -> Iterator[tuple[str, Array]]:
    """Yield the packed experts among tensors under GGUF's names: bytes ``[experts, rows, bytes]``, and their biases.

    Gates and what they are multiplied with, whose rows alternate, become two tensors.
    """
    own = {name: array for name, array in found if is_packed(name)}
    for name, array in own.items():
        if name.endswith("_bias"):
            yield from _parts(name.removesuffix("_bias"), "bias", array)
        elif name.endswith("_blocks"):
            module = name.removesuffix("_blocks")
            yield from _parts(module, "weight", mxfp4_blocks(array, own[f"{module}_scales"]))


def _parts(name: str, kind: str, array: Array) -> Iterator[tuple[str, Array]]:
    layer, _, module = name.removeprefix("model.layers.").partition(_EXPERTS)
    if module == "down_proj":
        yield f"blk.{layer}.ffn_down_exps.{kind}", array
    else:
        yield f"blk.{layer}.ffn_gate_exps.{kind}", np.ascontiguousarray(array[:, ::2])
        yield f"blk.{layer}.ffn_up_exps.{kind}", np.ascontiguousarray(array[:, 1::2])


def mxfp4_blocks(places: Array, scales: Array) -> Array:
    """Return GGUF's bytes ``[experts, rows, blocks * 17]``.

    Args:
        places: of weights, Hugging Face's bytes ``[experts, rows, blocks, 16]``.
        scales: exponents of two ``[experts, rows, blocks]``.
    """
    weights = np.stack((places & 15, places >> 4), -1).reshape(*places.shape[:-1], 32)
    halves = weights[..., :16] | weights[..., 16:] << 4
    return np.concatenate((scales[..., None], halves), -1).reshape(*places.shape[:2], -1)


def add_gpt_oss_config(writer: Any, config: dict[str, Any]) -> None:
    """Add what the header has of gpt-oss alone."""
    import gguf

    rope = config["rope_scaling"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
