"""How published formats pack integers of four and eight bits, laid out anew as the schemes of ``quant.linears`` have
it.

Integers are unsigned in GPTQ, AWQ and compressed-tensors: the schemes hold them less half their range, so that eight
stands for zero in four bits, and 128 in eight. All functions raise ValueError, which says what is wrong with a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIDTHS = (4, 8)
"""Bits of an integer; others do not lie within bytes."""


def words(tensor: Tensor) -> Tensor:
    """Return ``tensor``, which must have two dimensions of 32-bit integers."""
    if tensor.dtype != torch.int32 or tensor.dim() != 2 or not tensor.numel():
        raise ValueError(f"is {tensor.dtype} {list(tensor.shape)}; two dimensions of torch.int32 are expected")
    return tensor


def unpack(packed: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Return uint8 ``[rows, columns]`` of int32 ``[rows, columns * bits / 32]``.

    The lowest bits of a word are its first column; ``order``: else, for each column of a word, which place it has.
    """
    octets = packed.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)
        if order:
            octets = octets.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)
    return octets


def centred(values: Tensor, bits: int) -> Tensor:
    """Return int8 of uint8, less half the range of so many bits."""
    return (values - (1 << bits - 1)).view(torch.int8)


def pack_rows(values: Tensor) -> Tensor:
    """Return uint8 ``[rows / 2, columns]``, which ``formats.unpack_int4`` reads, of int8 ``[rows, columns]``."""
    if len(values) % 2:
        raise ValueError(f"has {len(values)} outputs; two share a byte, and they must be even in number")
    nibbles = values.view(torch.uint8)
    return (nibbles[0::2] & 15) | (nibbles[1::2] << 4)


def stored(values: Tensor, bits: int) -> Tensor:
    """Return int8 ``[rows, columns]`` as the linears hold weights of so many bits."""
    return pack_rows(values) if bits == 4 else values.contiguous()


def require_zeros(values: Tensor) -> Tensor:
    """Return ``values``, zero points, which must all be zero."""
    if (values.float() if values.is_floating_point() else values).any():  # float8 has no any()
        raise ValueError("has zero points, and the configuration says that there are none")
    return values


def require_group_index(tensor: Tensor) -> None:
    """Require one dimension of integers."""
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1 or not tensor.numel():
        raise ValueError(f"is {tensor.dtype} {list(tensor.shape)}; one dimension of integers is expected")


def group_index(tensor: Tensor, group_size: int) -> Tensor:
    """Return int32 ``[columns]``: the group of each column. ``group_size``: of the columns of a group; 0: all."""
    require_group_index(tensor)
    groups = -(-len(tensor) // group_size) if group_size else 1
    smallest, largest = (int(value) for value in tensor.aminmax())
    if not 0 <= smallest <= largest < groups:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"names group {wrong}; there are {groups} groups, the first of which is 0")
    return tensor.int()


def consecutive(tensor: Tensor, group_size: int) -> Tensor:
    """Return a ``group_index``, which must be that of groups that lie in a row."""
    index = group_index(tensor, group_size)
    if not torch.equal(index, torch.arange(len(index), dtype=torch.int32) // (group_size or len(index))):
        raise ValueError("names groups that do not lie in a row, and the configuration says that they do")
    return index
