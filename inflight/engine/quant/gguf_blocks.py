"""The blocks of quantized GGUF tensors: integers of a few bits, in groups with a scale and maybe a minimum.

A weight is its group's scale times its integer, and its group's minimum added. Layouts: ggml-common.h and ggml-quants.c
of https://github.com/ggml-org/ggml; what is decoded equals ``gguf.quants.dequantize`` of the ``gguf`` package bit for
bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.gguf.types import BLOCKS

_VALUES_AT_ONCE = 1 << 20
"""What is decoded in one go: its intermediate tensors stay in a processor's cache."""
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of four bits in IQ4_NL and IQ4_XS."""
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class Groups(NamedTuple):
    """What blocks hold."""

    integers: Tensor
    """``[blocks, groups, size of a group]``, of 8 bits."""
    scales: Tensor
    """Float32 ``[blocks, groups]``."""
    minimums: Tensor | None = None
    """Float32 ``[blocks, groups]``, added to weights; None: zero."""


def decode(weight: Tensor, kind: str) -> Tensor:
    """Return float32 ``[rows, values]`` of a tensor in blocks, uint8 ``[rows, bytes]``, of the type called ``kind``."""
    out = torch.empty(len(weight), weight.shape[1] // BLOCKS[kind].size * BLOCKS[kind].block, device=weight.device)
    blocks = out.view(-1, BLOCKS[kind].block).split(_VALUES_AT_ONCE // BLOCKS[kind].block)
    for (integers, scales, minimums), target in zip(_unpacked(weight, kind), blocks, strict=True):
        groups = target.view(integers.shape)
        groups.copy_(integers).mul_(scales[..., None])
        if minimums is not None:
            groups.add_(minimums[..., None])
    return out


def unpack(weight: Tensor, kind: str) -> Groups:
    """Return what blocks hold, by rows: integers ``[rows, groups, size of a group]``, the others ``[rows, groups]``."""
    integers, scales, minimums = zip(*_unpacked(weight, kind), strict=True)
    rows, size = len(weight), integers[0].shape[-1]
    return Groups(
        torch.cat(integers).view(rows, -1, size),
        torch.cat(scales).view(rows, -1),
        None if minimums[0] is None else torch.cat(minimums).view(rows, -1),
    )


def _unpacked(weight: Tensor, kind: str) -> Iterator[Groups]:
    """Yield what the blocks of a tensor hold, a few at a time."""
    for blocks in weight.view(-1, BLOCKS[kind].size).split(_VALUES_AT_ONCE // BLOCKS[kind].block):
        yield FORMATS[kind](blocks)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, as float32 ``[blocks, 1]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _shifted(packed: Tensor, bits: int) -> Tensor:
    """Return ``[..., 8 / bits, n]`` of bytes ``[..., n]``: all their lowest bits, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)


def _bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes ``[blocks, n]``, the lowest first, ``[blocks, 8 * n]``."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & 1).flatten(1)


def _look_up(values: tuple[int, ...], places: Tensor) -> Tensor:
    return _table(values, places.device)[places.int()]


@functools.cache
def _table(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return values on a device; once, since a CUDA graph cannot copy them there."""
    return torch.tensor(values, dtype=torch.int8, device=device)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_shifted(blocks[:, None, 2:], 4).flatten(2).view(torch.int8) - 8, _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    return Groups(_shifted(blocks[:, None, 4:], 4).flatten(2), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    integers = _shifted(blocks[:, 6:], 4).flatten(1) | _bits(blocks[:, 2:6]) << 4
    return Groups(integers[:, None].view(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    integers = _shifted(blocks[:, 8:], 4).flatten(1) | _bits(blocks[:, 4:8]) << 4
    return Groups(integers[:, None], _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(blocks[:, None, 2:].view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    integers = _shifted(blocks[:, 16:80].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return Groups(integers, _half(blocks, 80) * scales.float(), -_half(blocks, 82) * minimums.float())


def _q3_k(blocks: Tensor) -> Groups:
    """A set bit of the mask stands for no offset; scales have their lower four bits before their upper two."""
    integers = _shifted(blocks[:, 32:96].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16).view(torch.int8)
    offsets = (_shifted(blocks[:, :32], 1).reshape(-1, 16, 16) ^ 1) << 2
    lower, upper = _shifted(blocks[:, 96:104], 4).flatten(1), _shifted(blocks[:, 104:108], 2).flatten(1)
    scales = (lower | upper << 4).view(torch.int8) - 32
    return Groups(integers - offsets.view(torch.int8), _half(blocks, 108) * scales.float())


def _scales_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minimums of six bits each, ``[blocks, 8]``, of twelve bytes.

    Four bytes have four scales, and the upper two bits of four more; four the minimums likewise; four the lower bits of
    those: scales' below minimums'.
    """
    scales, minimums, lower = packed.unflatten(1, (3, 4)).unbind(1)
    return (
        torch.cat((scales & 63, lower & 15 | scales >> 2 & 48), 1),
        torch.cat((minimums & 63, lower >> 4 | minimums >> 2 & 48), 1),
    )


def _q4_k(blocks: Tensor) -> Groups:
    scales, minimums = _scales_of_k(blocks[:, 4:16])
    integers = _shifted(blocks[:, 16:].unflatten(1, (4, 32)), 4).reshape(-1, 8, 32)
    return Groups(integers, _half(blocks, 0) * scales.float(), -_half(blocks, 2) * minimums.float())


def _q5_k(blocks: Tensor) -> Groups:
    scales, minimums = _scales_of_k(blocks[:, 4:16])
    integers = _shifted(blocks[:, 48:].unflatten(1, (4, 32)), 4).reshape(-1, 8, 32) | _shifted(blocks[:, 16:48], 1) << 4
    return Groups(integers, _half(blocks, 0) * scales.float(), -_half(blocks, 2) * minimums.float())


def _q6_k(blocks: Tensor) -> Groups:
    lower = _shifted(blocks[:, :128].unflatten(1, (2, 64)), 4).reshape(-1, 16, 16)
    upper = _shifted(blocks[:, 128:192].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float()
    return Groups((lower | upper << 4).view(torch.int8) - 32, _half(blocks, 208) * scales)


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(_look_up(_IQ4, _shifted(blocks[:, None, 2:], 4).flatten(2)), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    """Scales have their lower four bits by pairs in four bytes, and their upper two in two."""
    places = _shifted(blocks[:, 8:].unflatten(1, (8, 16)), 4).flatten(2)
    lower = _shifted(blocks[:, 4:8, None], 4).flatten(1)
    upper = _shifted(blocks[:, 2:4, None], 2).flatten(1)
    scales = (lower | upper << 4).view(torch.int8) - 32
    return Groups(_look_up(_IQ4, places), _half(blocks, 0) * scales.float())


def _mxfp4(blocks: Tensor) -> Groups:
    """E2M1 with a power of two for each block, half of it here, since the values are doubled (OCP microscaling 1.0)."""
    exponents = blocks[:, :1].int()
    powers = torch.where(exponents < 2, 0x200000 << exponents, exponents - 1 << 23).view(torch.float32)
    return Groups(_look_up(_E2M1_DOUBLED, _shifted(blocks[:, None, 1:], 4).flatten(2)), powers)


def mxfp4_parts(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights and the scales of MXFP4 blocks as ``linears.Mxfp4Linear`` has them.

    A block's bytes hold its first sixteen values below its last ones; there they hold neighbours.
    """
    blocks = weight.view(len(weight), -1, BLOCKS[MXFP4].size)
    values = _shifted(blocks[..., None, 1:], 4).flatten(2)
    return (values[..., ::2] | values[..., 1::2] << 4).flatten(1), blocks[..., 0].contiguous()


MXFP4 = "MXFP4"
FORMATS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    MXFP4: _mxfp4,
}
"""What is decoded, by the type's name: each takes uint8 ``[blocks, bytes of a block]``."""
