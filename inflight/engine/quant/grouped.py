"""Linears of the formats that others publish (``quant.readers``), where ModelOpt has no scheme of this kind.

Weights stay packed as in ``quant.linears``. What is added: zero points, groups whose inputs do not lie in a row, scales
for blocks of rows and columns, and inputs that are rounded by the largest of each token. All of it is computed in
float32 and then rounded to the type of the computation.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from inflight.engine.quant.formats import (
    E4M3_MAX,
    INT8_MAX,
    NVFP4_BLOCK,
    fake_e4m3,
    fake_int8,
    fake_nvfp4_divided,
    unpack_e2m1,
    unpack_int4,
)
from inflight.engine.quant.gguf_linears import GGUF_LINEARS
from inflight.engine.quant.linears import (
    SCHEMES,
    Int4WeightLinear,
    LinearShape,
    Mxfp4Linear,
    NvFp4Linear,
    QuantizedLinear,
    Rounding,
    check_divides,
    multiplies_int8,
)


class Int4GroupLinear(Int4WeightLinear):
    """INT4 weights by groups, with zero points or with groups that do not lie in a row."""

    quant_algo = "W4A16_GROUPS"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        _hold_groups(self, shape)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return _scaled(unpack_int4(self.weight), self).to(dtype)


class Int8GroupLinear(QuantizedLinear):
    """INT8 weights by groups, maybe with zero points, or with groups that do not lie in a row."""

    quant_algo = "W8A16_GROUPS"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        check_divides("columns", shape.columns, shape.group_size, shape, self.quant_algo)
        self._hold("weight", (shape.rows, shape.columns), torch.int8)
        self._hold("weight_scale", (shape.rows, shape.columns // shape.group_size), torch.float32)
        _hold_groups(self, shape)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return _scaled(self.weight, self).to(dtype)


class Int8TokenLinear(Int8GroupLinear):
    """INT8 weights by rows or groups, and INT8 inputs, with a scale for each token."""

    quant_algo = "W8A8_TOKENS"

    @classmethod
    def rounds_inputs(cls) -> bool:
        return True

    def prepared(self, x: Tensor) -> Tensor:
        x = super().prepared(x)
        return fake_int8(x, int8_scales(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``; in integers where ``Int8Linear`` would.

        Sums of integers are exact, so that they need no float64; what is left is the rounding of the result.
        """
        in_a_row = self.weight_scale.shape[1] == 1 and self.zero_point is None
        if not in_a_row or x.dtype != torch.float32 or not multiplies_int8(x.device.type) or not len(x):
            return super().forward(x)
        x = super().prepared(x)
        scales = int8_scales(x)
        steps = (x / scales).round_().clamp_(-128, 127)
        sums = torch._int_mm(steps.to(torch.int8), self.weight.t())
        product = sums.float().mul_(self.weight_scale[:, 0]).mul_(scales)
        product[~scales[:, 0].isfinite()] = torch.nan  # integers cannot say it
        return product if self.bias is None else product.add_(self.bias)


class Fp8BlockLinear(QuantizedLinear):
    """E4M3 weights, with a scale for each block of rows and columns; it may have all rows, or all columns."""

    quant_algo = "FP8_BLOCKS"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self.block = shape.layout.block_rows or shape.rows, shape.group_size
        """Rows and columns that share a scale."""
        sizes = zip((shape.rows, shape.columns), self.block, strict=True)
        self._hold("weight", (shape.rows, shape.columns), torch.float8_e4m3fn)
        self._hold("weight_scale", tuple(math.ceil(size / block) for size, block in sizes), torch.float32)

    def decode(self, dtype: torch.dtype) -> Tensor:
        wide, scales = self.weight.float(), self.row_scales()
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : wide.shape[1]]
        return wide.mul_(scales).to(dtype)

    def row_scales(self) -> Tensor:
        """Return the scales of each row ``[rows, blocks]``."""
        return self.weight_scale.repeat_interleave(self.block[0], 0)[: len(self.weight)]


class Fp8ScaledLinear(Fp8BlockLinear):
    """The same, and E4M3 inputs with one scale."""

    quant_algo = "FP8_BLOCKS_STATIC"
    round_input = staticmethod(fake_e4m3)
    tensor_scales = ("input_scale",)


class Fp8TokenLinear(Fp8BlockLinear):
    """The same, and E4M3 inputs with a scale for each token, or for each group of a token's inputs."""

    quant_algo = "FP8_TOKENS"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self.input_group = shape.layout.input_group or shape.columns
        """Inputs of a token that share a scale."""
        check_divides("columns", shape.columns, self.input_group, shape, self.quant_algo)

    @classmethod
    def rounds_inputs(cls) -> bool:
        return True

    def takes_inputs_as(self, other: QuantizedLinear) -> bool:
        return super().takes_inputs_as(other) and self.input_group == getattr(other, "input_group", None)

    def prepared(self, x: Tensor) -> Tensor:
        groups = super().prepared(x).unflatten(-1, (-1, self.input_group))
        scales = groups.float().abs().amax(-1, keepdim=True) / E4M3_MAX
        return torch.where(scales == 0, 0.0, fake_e4m3(groups, scales)).flatten(-2)


class NvFp4WeightLinear(NvFp4Linear):
    """NVFP4 weights alone. Their scales are divided by ``weight_divisor``, where ModelOpt multiplies."""

    quant_algo = "NVFP4_WEIGHTS"
    round_input: ClassVar[Rounding | None] = None
    tensor_scales: ClassVar[tuple[str, ...]] = ("weight_divisor",)

    def decode(self, dtype: torch.dtype) -> Tensor:
        scales = self.weight_scale.float() / self.weight_divisor
        blocks = unpack_e2m1(self.weight).unflatten(-1, (-1, NVFP4_BLOCK))
        return (blocks * scales[..., None]).flatten(-2).to(dtype)


class NvFp4DividedLinear(NvFp4WeightLinear):
    """The same, and NVFP4 inputs, whose scales are divided by ``input_scale``."""

    quant_algo = "NVFP4_DIVIDED"
    round_input = staticmethod(fake_nvfp4_divided)
    tensor_scales = ("weight_divisor", "input_scale")


LINEARS: dict[str, type[QuantizedLinear]] = {
    **SCHEMES,
    **GGUF_LINEARS,
    **{
        linear.quant_algo: linear
        for linear in (
            Int4GroupLinear,
            Int8GroupLinear,
            Int8TokenLinear,
            Fp8BlockLinear,
            Fp8ScaledLinear,
            Fp8TokenLinear,
            NvFp4WeightLinear,
            NvFp4DividedLinear,
            Mxfp4Linear,
        )
    },
}
"""By name: ModelOpt's schemes, the types of blocks of GGUF files, and those of other formats."""


def int8_scales(x: Tensor) -> Tensor:
    """Return float32 ``[tokens, 1]``: by what inputs ``[tokens, columns]`` are divided to be INT8.

    Half the range of INT8, 127.5, is the largest, as compressed-tensors has it; a token of zeros is divided by one.
    """
    largest = x.float().abs().amax(-1, keepdim=True)
    return torch.where(largest == 0, 1.0, largest / (INT8_MAX + 0.5))


def _hold_groups(linear: QuantizedLinear, shape: LinearShape) -> None:
    """Make the tensors that groups may have beside their scales."""
    groups = (shape.rows, shape.columns // shape.group_size)
    linear._hold("zero_point", groups if shape.layout.zero_points else None, torch.int8)
    linear._hold("group_index", (shape.columns,) if shape.layout.group_index else None, torch.int32)


def _scaled(values: Tensor, linear: QuantizedLinear) -> Tensor:
    """Return float32 ``[rows, columns]`` of integers: less the zero points of their groups, times their scales."""
    scales, zeros, index = linear.weight_scale, linear.zero_point, linear.group_index
    wide = values.float()
    if index is not None:
        return (wide if zeros is None else wide.sub_(zeros[:, index])).mul_(scales[:, index])
    groups = wide.unflatten(-1, (scales.shape[1], -1))
    return (groups if zeros is None else groups.sub_(zeros[..., None])).mul_(scales[..., None]).flatten(-2)
