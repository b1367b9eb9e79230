"""What the native step takes of a model's linears: those of quantized checkpoints too, as ``native/step.h`` has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inflight.engine.native.bindings import NativeError, Weight
from inflight.engine.quant.convert import LinearParts
from inflight.engine.quant.formats import pack_int4, to_e4m3
from inflight.engine.quant.gguf_blocks import Groups
from inflight.engine.quant.gguf_linears import GgufLinear
from inflight.engine.quant.linears import Int4Fp8Linear, Int4WeightLinear, QuantizedLinear

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3, torch.uint8: 4}
"""The library's numbers for types; two INT4 are held as uint8."""
_PACKED = {"FP8": 3, "W4A16_AWQ": 4, "W8A16": 5, "W8A8_SQ_PER_CHANNEL": 6, "W4A8_AWQ": 3}
"""The library's number for what the weights of a scheme are packed as."""
_INT4, _INT8, _INT4_MINIMUMS, _INT8_MINIMUMS = 4, 5, 7, 8
"""The library's numbers for what integers by groups are packed as."""
_GROUPS = (16, 32, 64, 128)
"""Sizes of groups of INT4: no shorter than a vector has lanes, and dividing a chunk of a panel."""
_MOST_SUMMED = 1 << 17
"""A sum of so many products of INT8 may overflow 32 bits."""


@dataclass(frozen=True)
class Source:
    """A weight, and what goes with it."""

    weight: Tensor
    packed_type: int
    shape: tuple[int, int]
    """Outputs and inputs."""
    bias: Tensor | None
    scales: Tensor | None = None
    """Float32, of sums ``[outputs]``; with a group: of weights ``[outputs, inputs / group]``."""
    smooth: Tensor | None = None
    """Float32 ``[inputs]``."""
    input_scale: float = 0.0
    group: int = 0
    minimums: Tensor | None = None
    """Float32 ``[outputs, inputs / group]``, added to weights."""

    def structure(self) -> Weight:
        """Return it for the library; it must stay in memory meanwhile."""
        bias, scales, smooth, minimums = (
            None if one is None else one.data_ptr() for one in (self.bias, self.scales, self.smooth, self.minimums)
        )
        return Weight(
            TYPES[self.weight.dtype], self.packed_type, self.weight.data_ptr(), *self.shape, bias,
            scales, smooth, self.input_scale, self.group, minimums,
        )  # fmt: skip


def quantized_parts(name: str, linear: nn.Module) -> list[QuantizedLinear]:
    """Return the quantized linears that ``linear`` is made of; none: it is not quantized.

    Raises:
        NativeError: the library does not multiply them, or not as one product.
    """
    children = list(linear.children()) if isinstance(linear, LinearParts) else [linear]
    parts = [child for child in children if isinstance(child, QuantizedLinear)]
    if not parts and isinstance(linear, nn.Linear):
        return []
    if len(parts) < len(children) or not all(parts[0].takes_inputs_as(part) for part in parts):
        raise NativeError(f"the parts of {name} are quantized differently")
    one = parts[0]
    if isinstance(one, GgufLinear):
        return parts
    groups = {_group(part) for part in parts} if type(one) is Int4WeightLinear else set()
    if len(groups) > 1:
        raise NativeError(f"the parts of {name} have groups of {' and '.join(map(str, sorted(groups)))} inputs")
    if one.quant_algo not in _PACKED:
        raise NativeError(f"{name} is quantized in {one.quant_algo}")
    if groups and not groups <= set(_GROUPS):
        raise NativeError(f"{name} has groups of {_group(one)} inputs; {', '.join(map(str, _GROUPS))} are computed")
    if one.quant_algo == "W8A8_SQ_PER_CHANNEL" and one.weight.shape[1] >= _MOST_SUMMED:
        raise NativeError(f"{name} has {one.weight.shape[1]} inputs; fewer than {_MOST_SUMMED} are added up")
    return parts


def plain_source(linear: nn.Linear, packed_type: int | None) -> Source:
    """Return the weight of a linear that is not quantized, to be packed as a type; None: its own."""
    weight = linear.weight.detach()
    outputs, inputs = weight.shape
    bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
    return Source(weight, TYPES[weight.dtype] if packed_type is None else packed_type, (outputs, inputs), bias)


def quantized_source(parts: list[QuantizedLinear], dtype: torch.dtype) -> Source:
    """Return the weights of quantized linears that take one input alike, as one; ``dtype``: of the computation."""
    one = parts[0]
    if isinstance(one, GgufLinear):
        return _source_of_blocks([part for part in parts if isinstance(part, GgufLinear)])
    weight, scales = (torch.cat(tensors) for tensors in zip(*(_weight(part, dtype) for part in parts), strict=True))
    group = _group(one) if weight.dtype is torch.uint8 else 0
    input_scale = float(one.input_scale) if one.round_input else 0.0
    return Source(
        weight,
        _PACKED[one.quant_algo],
        (len(scales), weight.shape[1]),
        None if one.bias is None else torch.cat([part.bias for part in parts]).float(),
        scales * input_scale if one.round_input else scales,
        None if one.pre_quant_scale is None else one.pre_quant_scale.detach().float().contiguous(),
        input_scale,
        group,
    )


def _source_of_blocks(parts: list[GgufLinear]) -> Source:
    """Return weights in blocks, of maybe several types, as integers of the fewest bits and the shortest groups.

    A weight is its group's scale times its integer, and the group's minimum, if any part has minimums.
    """
    groups = [part.groups() for part in parts]
    size = min(one.integers.shape[-1] for one in groups)
    integers = torch.cat([one.integers.flatten(1) for one in groups])
    scales = torch.cat([_by_groups(one.scales, one, size) for one in groups])
    minimums = None
    if any(one.minimums is not None for one in groups):
        minimums = -torch.cat([
            torch.zeros_like(_by_groups(one.scales, one, size)) if one.minimums is None
            else _by_groups(one.minimums, one, size) for one in groups
        ])  # fmt: skip
    shape, weight = (len(integers), integers.shape[1]), integers.to(torch.int8)
    packed = _INT8 if minimums is None else _INT8_MINIMUMS
    lowest, highest = (int(value) for value in weight.aminmax())
    if minimums is not None and lowest >= 0 and highest < 16 and not shape[0] % 2:
        packed, weight, minimums = _INT4_MINIMUMS, pack_int4(weight - 8), minimums + 8 * scales
    elif minimums is None and lowest >= -8 and highest < 8 and not shape[0] % 2:
        packed, weight = _INT4, pack_int4(weight)
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).float()
    return Source(weight, packed, shape, bias, scales, group=size, minimums=minimums)


def _by_groups(values: Tensor, groups: Groups, size: int) -> Tensor:
    """Return values of groups ``[rows, columns / size]``, each as often as it has groups of ``size``."""
    return values.repeat_interleave(groups.integers.shape[-1] // size, dim=1)


def give_up(linear: nn.Module, kept: Tensor) -> None:
    """Free the memory of a linear's weights, but for a tensor that others use."""
    for module in linear.modules():
        for name in ("weight", "weight_scale"):
            held = module._parameters.get(name)
            if held is not None and held.data_ptr() != kept.data_ptr():
                setattr(module, name, nn.Parameter(held.new_empty(0), requires_grad=False))


def _weight(part: QuantizedLinear, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight as it is multiplied, and its scales by rows; W4A8 multiplies E4M3."""
    if isinstance(part, Int4Fp8Linear):
        weight = to_e4m3(Int4WeightLinear.decode(part, dtype), part.weight_scale_2)
        return weight, part.weight_scale_2.expand(len(weight))
    weight, scales = part.weight.detach(), part.weight_scale.detach()
    return weight, scales if scales.dim() else scales.expand(len(weight))


def _group(part: QuantizedLinear) -> int:
    return int(part.weight.shape[1] // part.weight_scale.shape[1])
