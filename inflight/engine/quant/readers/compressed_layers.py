"""Which linear holds weights of compressed-tensors, and what their tensors become.

Weights are stored as ``weight``, in INT8 or E4M3 and with their sign, or as ``weight_packed``: int32 ``[out, in * bits
/ 32]``, whose lowest bits come first, each integer plus half its range. ``weight_scale`` is ``[out, groups]``, ``[out,
1]``, one number, or by blocks. ``weight_zero_point`` has the same shape; beside packed weights it is packed along the
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from inflight.engine.quant import packing
from inflight.engine.quant.config import LayerQuantization
from inflight.engine.quant.formats import E8M0_NAN, MXFP4_BLOCK, NVFP4_BLOCK
from inflight.engine.quant.linears import Layout
from inflight.engine.quant.readers.compressed_args import Args

_PACKED, _NVFP4, _MXFP4 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_KINDS = {
    _PACKED: ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
    _NVFP4: ("float",),
    _MXFP4: ("float",),
}
"""By the format: what weights may be."""
FORMATS = tuple(_KINDS)
Relays = Mapping[str, tuple[str | None, Callable[[Tensor], Tensor]]]
"""By a tensor's name in its module: its name as the linear has it, and how it is laid out anew (``relay.Relay``)."""


def layer(weights: Args, inputs: Args | None, stored: str, ordered: bool) -> LayerQuantization:
    """Return how a linear is held.

    Args:
        weights, inputs: how they are quantized.
        stored: the format.
        ordered: the file says of each input which group of weights it belongs to.

    Raises:
        ValueError: no linear computes this; it says what it is.
    """
    if weights.kind not in _KINDS[stored] or weights.dynamic:
        raise ValueError(f"weights in {weights} are not what the format {stored} holds")
    if stored in (_NVFP4, _MXFP4):
        algorithm = _of_four_bits(weights, inputs, stored)
    else:
        of_kind = _of_floats if weights.kind == "float" else _of_integers
        algorithm = of_kind(weights, _rounding(inputs), stored, ordered)
    if algorithm is None or (inputs is not None and inputs.kind != weights.kind):
        raise ValueError(f"weights in {weights}, with inputs {f'in {inputs}' if inputs else 'as they are'}, in the "
                         f"format {stored}, are not supported")  # fmt: skip
    by_block = weights.strategy == "block"
    rows = weights.block_rows if by_block else 0 if weights.strategy == "tensor" else 1
    layout = Layout(rows, not weights.symmetric, ordered, inputs.group if inputs else 0)
    return LayerQuantization(algorithm, weights.group, layout)


def relays(weights: Args, stored: str, held: LayerQuantization) -> Relays:
    """Return what becomes of a module's tensors; those that are not named stay as they are."""
    if stored in (_NVFP4, _MXFP4):
        return {
            "weight_packed": ("weight", lambda tensor: tensor),
            "weight_scale": ("weight_scale", partial(_block_scales, stored=stored)),
            "weight_global_scale": ("weight_divisor", lambda tensor: tensor),
            "input_global_scale": ("input_scale", lambda tensor: tensor),
        }
    of_rows = held.quant_algo in ("W8A16", "W8A8_SQ_PER_CHANNEL")
    all_relays: dict[str, tuple[str | None, Callable[[Tensor], Tensor]]] = {
        "weight_scale": ("weight_scale", partial(_scales, of_rows=of_rows)),
        "weight_zero_point": (
            (None, packing.require_zeros) if weights.symmetric else ("zero_point", partial(_zeros, bits=weights.bits))
        ),
        "input_zero_point": (None, packing.require_zeros),
        "weight_g_idx": ("group_index", partial(_group_index, group_size=weights.group)),
    }
    if stored == _PACKED:
        all_relays["weight_packed"] = "weight", partial(_weight, bits=weights.bits)
        all_relays["weight_shape"] = None, _shape
    return all_relays


def _rounding(inputs: Args | None) -> str | None:
    """Return how inputs are rounded: not, by one scale of the file, or by one of each token's. None: not supported."""
    if inputs is None:
        return "none"
    if inputs.bits != 8 or not inputs.symmetric:
        return None
    if inputs.dynamic:
        by_token = inputs.strategy == "token" or (inputs.strategy == "group" and inputs.kind == "float")
        return "tokens" if by_token else None
    return "static" if inputs.strategy == "tensor" else None


def _of_four_bits(weights: Args, inputs: Args | None, stored: str) -> str | None:
    """Return the linear of E2M1 by blocks; inputs of NVFP4 are rounded as its weights are, by blocks of each token."""
    if (weights.bits, weights.symmetric) != (4, True):
        return None
    if stored == _MXFP4:
        return "MXFP4" if (weights.strategy, weights.group, inputs) == ("group", MXFP4_BLOCK, None) else None
    if (weights.strategy, weights.group) != ("tensor_group", NVFP4_BLOCK):
        return None
    if inputs is None:
        return "NVFP4_WEIGHTS"
    return "NVFP4_DIVIDED" if inputs == replace(weights, dynamic=True) else None


def _of_floats(weights: Args, rounding: str | None, _stored: str, ordered: bool) -> str | None:
    if weights.bits != 8 or not weights.symmetric or ordered or weights.strategy in ("token", "tensor_group"):
        return None
    static = "FP8" if weights.strategy == "tensor" else "FP8_BLOCKS_STATIC"
    return {"none": "FP8_BLOCKS", "tokens": "FP8_TOKENS", "static": static}.get(rounding or "")


def _of_integers(weights: Args, rounding: str | None, stored: str, ordered: bool) -> str | None:
    if weights.bits not in packing.WIDTHS or weights.strategy not in ("channel", "group"):
        return None
    simple = weights.symmetric and not ordered
    if stored == _PACKED and weights.bits == 4:
        return {"none": "W4A16_AWQ" if simple else "W4A16_GROUPS"}.get(rounding or "")
    by_rows = simple and weights.strategy == "channel"
    return {
        "none": "W8A16" if by_rows else "W8A16_GROUPS",
        "tokens": "W8A8_TOKENS",
        "static": "W8A8_SQ_PER_CHANNEL" if by_rows else None,
    }.get(rounding or "")


def _weight(tensor: Tensor, bits: int) -> Tensor:
    return packing.stored(packing.centred(packing.unpack(packing.words(tensor), bits), bits), bits)


def _scales(tensor: Tensor, of_rows: bool) -> Tensor:
    """Return scales of rows ``[out]``, or else in two dimensions. Raises ValueError."""
    if tensor.dim() > 2 or not tensor.is_floating_point() or (of_rows and tensor.dim() == 2 and tensor.shape[1] > 1):
        raise ValueError(f"is {tensor.dtype} {list(tensor.shape)}; scales of {'rows' if of_rows else 'weights'} are "
                         "expected")  # fmt: skip
    return tensor.flatten() if of_rows else tensor[:, None] if tensor.dim() == 1 else tensor


def _zeros(tensor: Tensor, bits: int) -> Tensor:
    """Return int8 ``[out, groups]``. Raises ValueError."""
    if tensor.dtype == torch.int8 and tensor.dim() in (1, 2):
        return tensor if tensor.dim() == 2 else tensor[:, None]
    return packing.centred(packing.unpack(packing.words(tensor).t(), bits), bits).t()


def _block_scales(tensor: Tensor, stored: str) -> Tensor:
    """Return scales of blocks, as they are. Raises ValueError: an exponent stands for no number."""
    if stored == _MXFP4 and tensor.dtype == torch.uint8 and (tensor == E8M0_NAN).any():
        raise ValueError(f"has the exponent {E8M0_NAN}, which stands for no number")
    return tensor


def _shape(tensor: Tensor) -> Tensor:
    """Return the shape of a packed weight, which the model knows: if another is meant, the weight itself has it."""
    if tensor.numel() != 2 or tensor.is_floating_point():
        raise ValueError(f"is {tensor.dtype} {list(tensor.shape)}; two integers are expected")
    return tensor


def _group_index(tensor: Tensor, group_size: int) -> Tensor:
    """Return the group of each column; where the file has -1 for one, groups lie in a row. Raises ValueError."""
    packing.require_group_index(tensor)
    if (tensor == -1).any():
        tensor = torch.arange(tensor.numel(), dtype=torch.int32) // (group_size or tensor.numel())
    return packing.group_index(tensor, group_size)
