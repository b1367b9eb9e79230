"""The number formats of quantized checkpoints: decoding them, and rounding to them.

``fake_*`` rounds a tensor to a format and back ("fake quantization"): what comes out has the values that hardware with
this arithmetic would have, in the type that went in. Products of a decoded weight and a rounded input are then those of
such hardware, but for the order of summation.

E4M3 and E2M1: OCP 8-bit floating point (arXiv:2209.05433) and OCP microscaling formats 1.0. NVFP4 is E2M1 in blocks of
16, each with an E4M3 scale, and one float32 scale for the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
INT8_MAX = 127
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
E8M0_BIAS, E8M0_NAN = 127, 255
"""Of the exponents of powers of two in bytes."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` as float8_e4m3fn: nearest, ties to even, saturating; NaN stays NaN."""
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def fake_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x`` to multiples of ``scale`` that E4M3 has."""
    return (to_e4m3(x, scale).float() * scale).to(x.dtype)


def fake_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x`` to multiples of ``scale`` from -128 to 127."""
    return ((x.float() / scale).round().clamp(-128, 127) * scale).to(x.dtype)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [..., n]`` as int8 and bfloat16 scales ``[..., 1]``, by the largest value of each row.

    The values are rounded with the scale as it is stored, so that its own rounding costs next to nothing. A row with a
    value that is not finite has no finite scale, and all values read from it are NaN.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / INT8_MAX).bfloat16()
    values = torch.where(scale > 0, wide / scale, 0.0).round().clamp(-INT8_MAX, INT8_MAX)
    return values.nan_to_num(INT8_MAX).to(torch.int8), scale


def fake_nvfp4(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x [..., n * 16]`` to NVFP4; each block's scale is a multiple of ``scale``, by its largest value."""
    return _fake_e2m1(x, lambda wanted: to_e4m3(wanted, scale).float() * scale)


def fake_nvfp4_divided(x: Tensor, divisor: Tensor) -> Tensor:
    """Round ``x [..., n * 16]`` to NVFP4; each block's scale is E4M3 divided by ``divisor``, by its largest value."""
    return _fake_e2m1(x, lambda wanted: to_e4m3(divisor * wanted, torch.ones_like(divisor)).float() / divisor)


def _fake_e2m1(x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Round ``x [..., n * 16]`` to E2M1 by blocks; ``rounded`` returns a block's scale, of the one that would be exact.

    E2M1 rounds to the nearest, ties to even, saturating: steps are 1/2 below 2, 1 below 4, then 2.
    """
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    scales = rounded(blocks.abs().amax(-1, keepdim=True) / E2M1_MAX)
    steps = blocks / scales
    step = torch.where(steps.abs() < 2, 0.5, torch.where(steps.abs() < 4, 1.0, 2.0))
    values = ((steps / step).round() * step).clamp(-E2M1_MAX, E2M1_MAX)
    # Where a block's scale rounds to zero, so does the block.
    products = torch.where(scales == 0, 0.0, values * scales)
    return products.flatten(-2).to(x.dtype)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """Return float32 powers of two of their exponents, uint8; of 255, which is not a number, infinity.

    The bits are put together, since a GPU's powers may be a little off. The least one, 2**-127, is subnormal.
    """
    return torch.where(exponents == 0, 1 << 22, exponents.int() << 23).view(torch.float32)


def unpack_int4(packed: Tensor) -> Tensor:
    """Return int8 ``[rows, columns]`` in -8...7 of uint8 ``[rows / 2, columns]``.

    A byte holds two's complements of two rows: the even row in its lower four bits, the odd row in its upper ones.
    """
    lower = (packed << 4).view(torch.int8) >> 4
    upper = packed.view(torch.int8) >> 4
    return torch.stack((lower, upper), dim=1).flatten(0, 1)


def pack_int4(weight: Tensor) -> Tensor:
    """Return uint8 ``[rows / 2, columns]`` of int8 ``[rows, columns]`` in -8...7, as ``unpack_int4`` takes it."""
    lower, upper = weight.view(torch.uint8).unflatten(0, (-1, 2)).unbind(1)
    return lower & 15 | upper << 4


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return float32 ``[rows, columns]`` of uint8 ``[rows, columns / 2]``.

    A byte holds two columns, the even one in its lower four bits: a sign, then the place in ``0, 0.5, 1, ... 6``.
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return table[torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).int()]
