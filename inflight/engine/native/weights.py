"""What the native step takes of a model's linears: those of quantized checkpoints too, as ``native/step.h`` has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inflight.engine.native.bindings import NativeError, Packed, Weight
from inflight.engine.quant.convert import LinearParts
from inflight.engine.quant.formats import MXFP4_BLOCK, pack_int4, to_e4m3
from inflight.engine.quant.gguf_blocks import Groups
from inflight.engine.quant.gguf_linears import GgufLinear
from inflight.engine.quant.grouped import Fp8BlockLinear, Fp8TokenLinear, Int8TokenLinear
from inflight.engine.quant.linears import Int4Fp8Linear, Int4WeightLinear, Mxfp4Linear, QuantizedLinear
from inflight.gguf.types import QUANTIZED, packed_together

TYPES = {
    torch.float32: Packed.FLOAT32,
    torch.bfloat16: Packed.BFLOAT16,
    torch.int8: Packed.INT8,
    torch.float8_e4m3fn: Packed.E4M3,
    torch.uint8: Packed.INT4,
}
"""The library's names for types; two INT4 are held as uint8."""
Packing = tuple[str, int, bool] | None
"""A scheme, the size of its groups, and whether they have zero points; None: not quantized."""
_PACKED = {
    "FP8": Packed.E4M3,
    "FP8_BLOCKS": Packed.E4M3,
    "FP8_BLOCKS_STATIC": Packed.E4M3,
    "FP8_TOKENS": Packed.E4M3,
    "W4A16_AWQ": Packed.INT4,
    "W4A16_GROUPS": Packed.INT4,
    "W4A8_AWQ": Packed.E4M3,
    "W8A16": Packed.INT8_COLUMNS,
    "W8A16_GROUPS": Packed.INT8_COLUMNS,
    "W8A8_SQ_PER_CHANNEL": Packed.INT8_SUMS,
    "W8A8_TOKENS": Packed.INT8_SUMS,
    "MXFP4": Packed.MXFP4,
}
"""Maps a scheme to the type its weights are packed as, if rows have one scale, and no zero points."""
_WITH_MINIMUMS = {Packed.INT4: Packed.INT4_MINIMUMS, Packed.INT8_COLUMNS: Packed.INT8_MINIMUMS}
_IN_GROUPS = {Packed.E4M3: Packed.E4M3_GROUPS}
"""Maps a packed type to the one that takes its place where groups of inputs have scales."""
_GROUPS = (16, 32, 64, 128)
"""Sizes of groups of INT4: no shorter than a vector has lanes, and dividing a chunk of a panel. Longer ones
are taken as several of these, with the same scale."""
_MOST_SUMMED = 1 << 17
"""A sum of so many products of INT8 may overflow 32 bits."""


@dataclass(frozen=True)
class PackSource:
    """A weight, and what goes with it."""

    weight: Tensor
    packed_type: Packed
    shape: tuple[int, int]
    """Outputs and inputs."""
    bias: Tensor | None
    scales: Tensor | None = None
    """Float32, of sums ``[outputs]``; with a group: of weights ``[outputs, inputs / group]``; MXFP4: uint8 of that."""
    smooth: Tensor | None = None
    """Float32 ``[inputs]``."""
    input_scale: float = 0.0
    group: int = 0
    minimums: Tensor | None = None
    """Float32 ``[outputs, inputs / group]``, added to weights."""
    input_group: int = 0
    """Inputs of a row that are rounded by their own largest; 0: none are."""

    def structure(self) -> Weight:
        """Return it for the library; it must stay in memory meanwhile."""
        bias, scales, smooth, minimums = (
            None if one is None else one.data_ptr() for one in (self.bias, self.scales, self.smooth, self.minimums)
        )
        # Both formats of 4 bits are uint8.
        kind = Packed.MXFP4 if self.packed_type is Packed.MXFP4 else TYPES[self.weight.dtype]
        return Weight(
            kind, self.packed_type, self.weight.data_ptr(), *self.shape, bias, scales, smooth, self.input_scale,
            self.group, minimums, self.input_group,
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
    if one.quant_algo not in _PACKED:
        raise NativeError(f"{name} is quantized in {one.quant_algo}")
    if type(one) is Int4Fp8Linear:
        return parts
    groups = {_group(part) for part in parts}
    if len(groups) > 1:
        raise NativeError(f"the parts of {name} have groups of {' and '.join(map(str, sorted(groups)))} inputs")
    _check_groups(name, parts, groups.pop())
    if _PACKED[one.quant_algo] is Packed.INT8_SUMS and one.weight.shape[1] >= _MOST_SUMMED:
        raise NativeError(f"{name} has {one.weight.shape[1]} inputs; fewer than {_MOST_SUMMED} are added up")
    return parts


def _check_groups(name: str, parts: list[QuantizedLinear], group: int) -> None:
    """Check that the library multiplies weights with such groups. Raises NativeError."""
    one = parts[0]
    packed = _PACKED[one.quant_algo]
    if any(getattr(part, "group_index", None) is not None for part in parts):
        raise NativeError(f"the groups of {name} do not lie in a row")
    zeros = [getattr(part, "zero_point", None) is not None for part in parts]
    if any(zeros) and (packed not in _WITH_MINIMUMS or not all(zeros)):
        raise NativeError(f"{name} has zero points in {one.quant_algo}, or some of its parts have")
    if packed is Packed.INT8_SUMS and group:
        raise NativeError(f"{name} has groups of {group} inputs, and rounds inputs to INT8")
    if packed in _WITH_MINIMUMS and group and group not in _GROUPS:
        raise NativeError(f"{name} has groups of {group} inputs; {', '.join(map(str, _GROUPS))} are computed")
    if any(size and size % _GROUPS[0] and size != one.weight.shape[1] for size in map(_input_group, parts)):
        raise NativeError(f"{name} rounds inputs by groups of {_input_group(one)}; {_GROUPS[0]} must divide them")


def packing_of(parts: list[QuantizedLinear]) -> Packing:
    """Return how a weight of these parts is packed."""
    if not parts:
        return None
    one = parts[0]
    if isinstance(one, GgufLinear):
        return ", ".join(part.quant_algo for part in parts), 0, False
    group = 0 if isinstance(one, Int4Fp8Linear) else _group(one)
    return one.quant_algo, group, getattr(one, "zero_point", None) is not None


def packed_type(parts: list[QuantizedLinear]) -> Packed:
    """Return what the weights of these parts are packed as; they are in no blocks of GGUF."""
    one = parts[0]
    packed = _PACKED[one.quant_algo]
    if isinstance(one, Int4Fp8Linear) or not _group(one):
        return packed
    has_zeros = getattr(one, "zero_point", None) is not None
    return (_WITH_MINIMUMS if has_zeros else _IN_GROUPS).get(packed, packed)


def plain_source(weight: Tensor, bias: nn.Parameter | None, packed_type: Packed | None) -> PackSource:
    """Return the weight and bias of a linear that is not quantized, to be packed as a type; None: the weight's own."""
    outputs, inputs = weight.shape
    bias = None if bias is None else bias.detach().float().contiguous()
    return PackSource(weight, TYPES[weight.dtype] if packed_type is None else packed_type, (outputs, inputs), bias)


def quantized_source(parts: list[QuantizedLinear], dtype: torch.dtype) -> PackSource:
    """Return the weights of quantized linears that take one input alike, as one; ``dtype``: of the computation."""
    one = parts[0]
    if isinstance(one, GgufLinear):
        return _source_of_blocks([part for part in parts if isinstance(part, GgufLinear)])
    weight, scales = (torch.cat(tensors) for tensors in zip(*(_weight(part, dtype) for part in parts), strict=True))
    group = 0 if isinstance(one, Int4Fp8Linear) else _group(one)
    minimums = None
    if getattr(one, "zero_point", None) is not None:
        minimums = -scales * torch.cat([_repeated(part, part.zero_point) for part in parts])
    input_scale = float(one.input_scale) if one.round_input else 0.0
    return PackSource(
        weight,
        packed_type(parts),
        (len(scales), one.weight.shape[1] * (2 if isinstance(one, Mxfp4Linear) else 1)),
        None if one.bias is None else torch.cat([part.bias for part in parts]).float(),
        scales * input_scale if one.round_input else scales,
        None if one.pre_quant_scale is None else one.pre_quant_scale.detach().float().contiguous(),
        input_scale,
        group,
        minimums,
        _input_group(one),
    )


def _source_of_blocks(parts: list[GgufLinear]) -> PackSource:
    """Return weights in blocks, of maybe several types, as integers by groups.

    A weight is its group's scale times its integer, and the group's minimum added, if any part has minimums.
    """
    # By the types and not by what the integers are, since all experts of a layer are packed as one type.
    common = packed_together([QUANTIZED[part.type.name] for part in parts])
    groups, size = [part.groups() for part in parts], common.group
    weight = torch.cat([one.integers.flatten(1) for one in groups]).to(torch.int8)
    scales = torch.cat([_by_groups(one.scales, one, size) for one in groups])
    minimums = None
    if common.minimums:
        minimums = torch.cat([
            _by_groups(torch.zeros_like(one.scales) if one.minimums is None else one.minimums, one, size)
            for one in groups
        ])  # fmt: skip
    shape, kind = (len(weight), weight.shape[1]), Packed.INT8_COLUMNS
    if common.bits == 4 and not shape[0] % 2:  # two rows lie in a byte
        if minimums is not None:
            weight, minimums = weight - 8, minimums + 8 * scales
        kind, weight = Packed.INT4, pack_int4(weight)
    bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts]).float()
    packed = kind if minimums is None else _WITH_MINIMUMS[kind]
    return PackSource(weight, packed, shape, bias, scales, group=size, minimums=minimums)


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
    if isinstance(part, Fp8BlockLinear):
        scales = part.row_scales()
    if scales.dim() == 2:
        scales = _repeated(part, scales) if _group(part) else scales[:, 0]
    return weight, scales if scales.dim() else scales.expand(len(weight))


def _group(part: QuantizedLinear) -> int:
    """Return the size of the groups that the library is told of; 0: it is told of none, since a row has one scale.

    Of integers it is the largest that the library has, or else the linear's own.
    """
    whole, scales = part.weight.shape[1], part.weight_scale
    has_zeros = getattr(part, "zero_point", None) is not None
    if scales.dim() < 2 or (scales.shape[1] == 1 and part.weight.dtype is not torch.uint8 and not has_zeros):
        return 0
    if isinstance(part, Fp8BlockLinear):
        return part.block[1]
    if isinstance(part, Mxfp4Linear):
        return MXFP4_BLOCK
    size = int(whole // scales.shape[1])
    return max((served for served in _GROUPS if size % served == 0), default=size)


def _repeated(part: QuantizedLinear, values: Tensor) -> Tensor:
    """Return scales or zero points ``[rows, groups]``, once for each group that the library is told of."""
    if isinstance(part, Fp8BlockLinear | Mxfp4Linear):
        return values.contiguous()
    return values.repeat_interleave(part.weight.shape[1] // values.shape[1] // _group(part), 1)


def _input_group(part: QuantizedLinear) -> int:
    """Return how many inputs are rounded by their own largest; 0: none are."""
    if isinstance(part, Int8TokenLinear):
        return int(part.weight.shape[1])
    return part.input_group if isinstance(part, Fp8TokenLinear) else 0
