"""Linears whose weight stays as a quantized checkpoint holds it: one class per scheme, found by ModelOpt's name for it.

The weight is decoded to the type of the computation for each call, and the input is rounded to what the scheme's
arithmetic has. Both are done as ModelOpt's simulation does them (``modelopt.torch.quantization``), so that what is
measured here is what hardware with that arithmetic would show. Tensors have the names they have in checkpoints.

Rounding magnifies: a sum that differs in its last bit, because it was added up in another order, may round to the next
value, and a few layers later nothing is left of the small difference. So that a request's tokens do not depend on what
else is in its batch, a model that rounds inputs or keys and values adds up in float64 (``exact``): there the order does
not show in what is left after rounding to the type of the computation. What has one order only needs no float64:
integers, and attention row by row (``attention.torch_backend``).
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.quant.formats import (
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    decode_e8m0,
    fake_e4m3,
    fake_int8,
    fake_nvfp4,
    unpack_e2m1,
    unpack_int4,
)
from inflight.errors import DeploymentError

Rounding: TypeAlias = "staticmethod[[Tensor, Tensor], Tensor]"
"""Rounds inputs by a scale."""
_OF_INPUTS = ("pre_quant_scale", "input_scale")
"""What ``QuantizedLinear.prepared`` takes."""


@dataclass(frozen=True)
class Layout:
    """What the scheme of a linear leaves open (``quant.grouped``); the defaults are those of ModelOpt's schemes."""

    block_rows: int = 1
    """Outputs that share a scale; 0: all."""
    zero_points: bool = False
    """Whether each group of weights has a value that stands for zero."""
    group_index: bool = False
    """Whether the checkpoint says of each input which group it belongs to; else groups lie in a row."""
    input_group: int = 0
    """Inputs that share a scale, where each token's inputs are rounded by their own largest; 0: all of a token's."""


@dataclass(frozen=True)
class LinearShape:
    """What a scheme needs to know of the linear it takes the place of."""

    name: str
    """In the checkpoint; for errors."""
    rows: int
    """Outputs."""
    columns: int
    """Inputs."""
    bias: bool
    dtype: torch.dtype
    """Of the computation."""
    group_size: int
    """Inputs that share a scale, where the scheme has groups."""
    smoothed: bool
    """Whether the checkpoint has a ``pre_quant_scale`` for it, by which inputs are multiplied."""
    exact: bool
    """Whether to add up in float64."""
    layout: Layout = field(default_factory=Layout)


class ExactLinear(nn.Linear):
    """A linear that is not quantized, in a model that rounds elsewhere: it adds up in float64."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return _exact_linear(x, self.weight, self.bias)


class QuantizedLinear(nn.Module, ABC):
    """A linear with a quantized weight; tensors are made on the meta device, the checkpoint brings their contents."""

    quant_algo: ClassVar[str]
    round_input: ClassVar[Rounding | None] = None
    """Rounds inputs by ``input_scale`` as the scheme's arithmetic does; None: the scheme quantizes weights only."""
    per_element: ClassVar[int] = 1
    """Weights that an element of ``weight`` holds."""
    tensor_scales: ClassVar[tuple[str, ...]] = ()
    """The names of the scales of which there is one for the whole tensor."""
    weight: nn.Parameter

    def __init__(self, shape: LinearShape) -> None:
        """
        Raises:
            DeploymentError: the scheme cannot hold a weight of this shape.
        """
        super().__init__()
        self.linear = _exact_linear if shape.exact else functional.linear
        self._hold("bias", (shape.rows,) if shape.bias else None, shape.dtype)
        self._hold("pre_quant_scale", (shape.columns,) if shape.smoothed else None, shape.dtype)
        for name in self.tensor_scales:
            self._hold(name, (), torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return self.linear(self.prepared(x), self.decode(x.dtype), self.bias)

    def prepared(self, x: Tensor) -> Tensor:
        """Return ``x`` as the product takes it: smoothed and rounded."""
        x = x if self.pre_quant_scale is None else x * self.pre_quant_scale
        return x if self.round_input is None else self.round_input(x, self.input_scale)

    def takes_inputs_as(self, other: QuantizedLinear) -> bool:
        """Whether ``prepared`` is the same as another's, and both have a bias or none has."""
        return (
            type(self) is type(other)
            and (self.bias is None) == (other.bias is None)
            and _same(self.pre_quant_scale, other.pre_quant_scale)
            and _same(getattr(self, "input_scale", None), getattr(other, "input_scale", None))
        )

    @classmethod
    def rounds_inputs(cls) -> bool:
        """Whether inputs are rounded."""
        return cls.round_input is not None

    def decodes_each_time(self, dtype: torch.dtype) -> bool:
        """Whether each product in ``dtype`` decodes the weight, where it lies."""
        return True

    @property
    def elements(self) -> int:
        """How many weights there are."""
        return self.weight.numel() * self.per_element

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights and their scales."""
        return sum(parameter.nbytes for name, parameter in self.named_parameters() if name not in (*_OF_INPUTS, "bias"))

    def without_weight(self) -> Self:
        """Return what is left for ``prepared``."""
        rest = copy.copy(self)
        rest._parameters = {name: held if name in _OF_INPUTS else None for name, held in self._parameters.items()}
        return rest

    @abstractmethod
    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[rows, columns]``."""

    def _hold(self, name: str, size: tuple[int, ...] | None, dtype: torch.dtype) -> None:
        tensor = None if size is None else torch.empty(size, dtype=dtype, device="meta")
        self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))


class Fp8Linear(QuantizedLinear):
    """FP8: E4M3 weights and inputs, one scale each."""

    quant_algo = "FP8"
    round_input = staticmethod(fake_e4m3)
    tensor_scales = ("weight_scale", "input_scale")

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self._hold("weight", (shape.rows, shape.columns), torch.float8_e4m3fn)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.float() * self.weight_scale).to(dtype)


class Int8WeightLinear(QuantizedLinear):
    """INT8 weights, a scale per row."""

    quant_algo = "W8A16"

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self._hold("weight", (shape.rows, shape.columns), torch.int8)
        self._hold("weight_scale", (shape.rows,), torch.float32)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.float() * self.weight_scale[:, None]).to(dtype)


class Int8Linear(Int8WeightLinear):
    """INT8 weights and inputs (SmoothQuant, arXiv:2211.10438): a scale per row, and one for the input."""

    quant_algo = "W8A8_SQ_PER_CHANNEL"
    round_input = staticmethod(fake_int8)
    tensor_scales = ("input_scale",)

    @classmethod
    def joined(cls, parts: Sequence[Int8Linear]) -> Int8Linear:
        """Return one linear whose outputs are those of loaded ``parts`` in a row, which take inputs alike.

        ModelOpt gives linears of one input the same scales, so that they can be one product.
        """
        one = parts[0]
        joined = copy.copy(one)
        joined._parameters = dict(one._parameters)
        for name in ("weight", "weight_scale") if one.bias is None else ("weight", "weight_scale", "bias"):
            whole = torch.cat([getattr(part, name) for part in parts])
            setattr(joined, name, nn.Parameter(whole, requires_grad=False))
        return joined

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``; in integers where the processor can multiply them fast.

        Sums of integers are exact, so that they need no float64; what is left is the rounding of the result.
        """
        if self.decodes_each_time(x.dtype) or not len(x):
            return super().forward(x)
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale
        steps = (x / self.input_scale).round_().clamp_(-128, 127)
        sums = torch._int_mm(steps.to(torch.int8), self.weight.t())
        product = sums.view(torch.float32).copy_(sums)  # where they lie: fresh memory takes longer than the arithmetic
        product.mul_(self.weight_scale * self.input_scale)
        if math.isnan(steps.sum()):  # integers cannot say it
            product[steps.isnan().any(-1)] = torch.nan
        return product if self.bias is None else product.add_(self.bias)

    def decodes_each_time(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float32 or not multiplies_int8(self.weight.device.type)


class Int4WeightLinear(QuantizedLinear):
    """INT4 weights (AWQ, arXiv:2306.00978): a scale per row and group of columns."""

    quant_algo = "W4A16_AWQ"
    per_element = 2

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        check_divides("rows", shape.rows, 2, shape, self.quant_algo)
        check_divides("columns", shape.columns, shape.group_size, shape, self.quant_algo)
        self._hold("weight", (shape.rows // 2, shape.columns), torch.uint8)
        self._hold("weight_scale", (shape.rows, shape.columns // shape.group_size), torch.float32)

    def decode(self, dtype: torch.dtype) -> Tensor:
        groups = unpack_int4(self.weight).float().unflatten(-1, (self.weight_scale.shape[1], -1))
        return (groups * self.weight_scale[..., None]).flatten(-2).to(dtype)


class Int4Fp8Linear(Int4WeightLinear):
    """INT4 weights that are computed with in E4M3, and E4M3 inputs (W4A8 AWQ)."""

    quant_algo = "W4A8_AWQ"
    round_input = staticmethod(fake_e4m3)
    tensor_scales = ("weight_scale_2", "input_scale")

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the INT4 weight, rounded to E4M3 by ``weight_scale_2``."""
        return fake_e4m3(super().decode(dtype), self.weight_scale_2)


class NvFp4Linear(QuantizedLinear):
    """NVFP4 weights and inputs."""

    quant_algo = "NVFP4"
    round_input: ClassVar[Rounding | None] = staticmethod(fake_nvfp4)
    per_element = 2
    tensor_scales: ClassVar[tuple[str, ...]] = ("weight_scale_2", "input_scale")

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        if shape.group_size != NVFP4_BLOCK:
            raise DeploymentError(f"checkpoint: {shape.name}: group_size {shape.group_size}; NVFP4 has {NVFP4_BLOCK}")
        check_divides("columns", shape.columns, NVFP4_BLOCK, shape, self.quant_algo)
        self._hold("weight", (shape.rows, shape.columns // 2), torch.uint8)
        self._hold("weight_scale", (shape.rows, shape.columns // NVFP4_BLOCK), torch.float8_e4m3fn)

    def decode(self, dtype: torch.dtype) -> Tensor:
        scales = self.weight_scale.float() * self.weight_scale_2
        blocks = unpack_e2m1(self.weight).unflatten(-1, (-1, NVFP4_BLOCK))
        return (blocks * scales[..., None]).flatten(-2).to(dtype)


class Mxfp4Linear(QuantizedLinear):
    """MXFP4 weights, as the experts of gpt-oss: E2M1 in blocks of 32 columns, each with a power of two as its scale.

    A scale is the exponent of two plus 127 (E8M0 of OCP microscaling formats 1.0).
    """

    quant_algo = "MXFP4"
    per_element = 2

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        check_divides("columns", shape.columns, MXFP4_BLOCK, shape, self.quant_algo)
        self._hold("weight", (shape.rows, shape.columns // 2), torch.uint8)
        self._hold("weight_scale", (shape.rows, shape.columns // MXFP4_BLOCK), torch.uint8)

    def decode(self, dtype: torch.dtype) -> Tensor:
        blocks = unpack_e2m1(self.weight).unflatten(-1, (-1, MXFP4_BLOCK))
        return (blocks * decode_e8m0(self.weight_scale)[..., None]).flatten(-2).to(dtype)


SCHEMES: dict[str, type[QuantizedLinear]] = {
    scheme.quant_algo: scheme
    for scheme in (Fp8Linear, Int8Linear, Int8WeightLinear, Int4WeightLinear, Int4Fp8Linear, NvFp4Linear)
}
"""By ModelOpt's ``quant_algo``."""


@functools.cache
def multiplies_int8(device: str) -> bool:
    """Whether products of INT8 are fast and exact: older x86 processors add up pairs in 16 bits, which saturate.

    A product that would saturate is tried too: oneDNN may use less than the processor has (``ONEDNN_MAX_CPU_ISA``).
    """
    if device != "cpu" or not torch.backends.mkldnn.is_available() or not torch.cpu._is_vnni_supported():
        return False
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127 * 127).all())


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return wide.to(x.dtype)


def check_divides(what: str, size: int, divisor: int, shape: LinearShape, quant_algo: str) -> None:
    """Require that ``size`` is a multiple of ``divisor``. Raises DeploymentError."""
    if size % divisor:
        raise DeploymentError(
            f"checkpoint: {shape.name} has {size} {what}; {quant_algo} needs a multiple of {divisor} here"
        )
