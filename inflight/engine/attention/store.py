"""Storing keys and values in the paged cache, in the Triton language; and the types that they are stored in.

The kernel knows slots and strides, not sequences; ``kernel_attention`` prepares both. What it stores is, bit for bit,
what ``paged`` stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 and taken away again, it leaves the nearest integer, ties to even."""


@dataclass(frozen=True)
class StoredKv:
    """One layer's keys and values as they are stored: ``[kv_heads, slots, head_dim]``, any strides but the last's."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor
    """What stored keys are multiples of ``[kv_heads, slots]``, any strides; INT8 is stored together with its own."""
    value_scales: Tensor


@triton.jit
def quantized(x, scale, stored: tl.constexpr):
    """Return ``x`` as multiples of ``scale`` in a stored type that is not INT8: nearest, ties to even, saturating."""
    if stored == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) / scale, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(stored)


@triton.jit
def _int8_of(x):
    """Return ``x`` as INT8, and its bfloat16 scale: as ``quant.formats.to_int8``."""
    x = x.to(tl.float32)
    broken = tl.sum(x * 0.0, 0)  # a maximum passes over what is no number
    scale = ((tl.max(tl.abs(x), 0) + broken) / _INT8_MAX).to(tl.bfloat16)
    x = tl.where(scale > 0, x / scale.to(tl.float32), 0.0)
    x = (x + _ROUND) - _ROUND
    return tl.clamp(x, -_INT8_MAX, _INT8_MAX).to(tl.int8), scale


@triton.jit
def _store_row(x, stored, scales, place, scale_place, dims, inside, real):
    """Store one head of one token."""
    if stored.dtype.element_ty == tl.int8:
        row, scale = _int8_of(x)
        tl.store(scales + scale_place, scale, mask=real)
        tl.store(stored + place + dims, row, mask=inside)
    else:
        scale = tl.load(scales + scale_place, mask=real, other=1.0)
        tl.store(stored + place + dims, quantized(x, scale, stored.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots"])
def _store_kernel(
    key, value, keys, values, slots, key_scales, value_scales, key_token, key_head, value_token, value_head,
    keys_head, keys_slot, values_head, values_slot, scale_head, scale_slot,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store one token's key and value of one head; a negative slot is none."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    inside = (dims < HEAD_DIM) & (slot >= 0)
    k = tl.load(key + token * key_token + head * key_head + dims, mask=inside, other=0.0)
    v = tl.load(value + token * value_token + head * value_head + dims, mask=inside, other=0.0)
    scale = head * scale_head + slot * scale_slot
    _store_row(k, keys, key_scales, head * keys_head + slot * keys_slot, scale, dims, inside, slot >= 0)
    _store_row(v, values, value_scales, head * values_head + slot * values_slot, scale, dims, inside, slot >= 0)


def store(key: Tensor, value: Tensor, slots: Tensor, stored: StoredKv) -> None:
    """Store keys and values ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``, int32; negative: nowhere."""
    tokens, heads, dim = key.shape
    _store_kernel[(tokens, heads)](
        key, value, stored.keys, stored.values, slots, stored.key_scales, stored.value_scales,
        *key.stride()[:2], *value.stride()[:2], *stored.keys.stride()[:2], *stored.values.stride()[:2],
        *stored.key_scales.stride(),
        HEAD_DIM=dim, WIDTH=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
