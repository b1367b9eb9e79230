"""A kernel in the Triton language that rotates queries and keys, and stores keys and values in the paged cache.

It takes slots and strides, not sequences; ``triton_backend`` prepares both. It stores, bit for bit, what
``kvcache.memory_pool`` stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models.layers import GemmaRmsNorm, RmsNorm, WideRmsNorm

_E4M3_MAX = tl.constexpr(448.0)
_INT8_MAX = tl.constexpr(127.0)
_ROUND = tl.constexpr(1.5 * 2**23)
"""Added to a small float32 and taken away again, it leaves the nearest integer, ties to even."""
_PLAIN, _OFFSET, _WIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_ROWS = 16
"""Heads of a tile: with heads of 128, four warps load 16 bytes per thread and half."""


def form_of(norm: RmsNorm) -> int:
    """Return what a norm does with its weight, as the kernels know it (``config.NormKind``)."""
    form = _OFFSET if isinstance(norm, GemmaRmsNorm) else _WIDE if isinstance(norm, WideRmsNorm) else _PLAIN
    return int(form.value)


@triton.jit
def quantized(x, scale, stored: tl.constexpr):
    """Return ``x`` as multiples of ``scale`` in a stored type that is not INT8: nearest, ties to even, saturating."""
    if stored == tl.float8e4nv:
        # Triton's `/` may be off by two last bits, and a value halfway between two of E4M3's then goes the other way.
        x = tl.div_rn(x.to(tl.float32), scale.to(tl.float32))
        x = tl.clamp(x, -_E4M3_MAX, _E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(stored)


@triton.jit
def gained(normal, gain, FORM: tl.constexpr):
    """Return normalized float32 values times the norm's weight; ``FORM`` is that of ``form_of``."""
    wide = gain.to(tl.float32)
    if FORM == _PLAIN:
        result = normal.to(gain.dtype).to(tl.float32) * wide
    elif FORM == _OFFSET:
        result = normal * (1.0 + wide)
    else:
        result = normal * wide
    return result


@triton.jit
def _steps_of(x, scale):
    """Return ``x`` as INT8 multiples of ``scale``, bfloat16: as ``quant.formats.to_int8``."""
    x = tl.where(scale > 0, tl.div_rn(x, scale.to(tl.float32)), 0.0)
    x = (x + _ROUND) - _ROUND
    return tl.clamp(x, -_INT8_MAX, _INT8_MAX).to(tl.int8)


@triton.jit
def _largest_of(x):
    """Return the largest absolute value of each row; NaN where the row has NaN or infinity."""
    return tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)  # a maximum ignores NaN


@triton.jit
def _load_part(rows, real, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first ``SIZE`` elements behind each pointer of ``rows``, float32 ``[rows, WIDTH]``."""
    part = tl.zeros((real.shape[0], WIDTH), tl.float32)
    if SIZE > 0:
        dims = tl.arange(0, WIDTH)
        mask = real[:, None] & (dims < SIZE)[None, :]
        part = tl.load(rows[:, None] + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    return part


@triton.jit
def _store_part(rows, x, scale, real, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Store the first ``SIZE`` columns of ``x [rows, WIDTH]`` behind each pointer, as multiples of ``scale [rows]``."""
    if SIZE > 0:
        dims = tl.arange(0, WIDTH)
        mask = real[:, None] & (dims < SIZE)[None, :]
        kind: tl.constexpr = rows.dtype.element_ty
        if kind == tl.int8:
            tl.store(rows[:, None] + dims[None, :], _steps_of(x, scale[:, None]), mask=mask)
        else:
            tl.store(rows[:, None] + dims[None, :], quantized(x, scale[:, None], kind), mask=mask)


@triton.jit
def _store_parts(
    rows, low, high, rest, scale, real,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store the parts of ``_rotated_heads`` behind each pointer, as multiples of ``scale [rows]``."""
    if INTERLEAVED:
        _store_part(rows, tl.interleave(low, high), scale, real, 2 * HALF, 2 * HALF_WIDTH)
    else:
        _store_part(rows, low, scale, real, HALF, HALF_WIDTH)
        _store_part(rows + HALF, high, scale, real, HALF, HALF_WIDTH)
    _store_part(rows + 2 * HALF, rest, scale, real, REST, REST_WIDTH)


@triton.jit
def _store_heads(
    low, high, rest, rows, scales, real,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store heads of one token in the cache; ``rows`` and ``scales`` point to the place of each."""
    if rows.dtype.element_ty == tl.int8:
        largest = tl.maximum(_largest_of(low), _largest_of(high), propagate_nan=tl.PropagateNan.ALL)
        largest = tl.maximum(largest, _largest_of(rest), propagate_nan=tl.PropagateNan.ALL)
        scale = tl.div_rn(largest, _INT8_MAX).to(tl.bfloat16)
        tl.store(scales, scale, mask=real)
    elif rows.dtype.element_ty == tl.float8e4nv:
        scale = tl.load(scales, mask=real, other=1.0)
    else:
        scale = tl.full(real.shape, 1.0, tl.float32)
    _store_parts(rows, low, high, rest, scale, real, HALF, REST, HALF_WIDTH, REST_WIDTH, INTERLEAVED)


@triton.jit
def _gained_part(
    x, inverse, gain, apart, real, SIZE: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr, kind: tl.constexpr
):  # fmt: skip
    """Return a part of normalized heads as the norm rounds it.

    ``apart``: how far behind ``gain`` the weights of each row begin; None: all rows have the same.
    """
    if SIZE > 0:
        dims = tl.arange(0, WIDTH)
        if apart is None:
            weight = tl.load(gain + dims, mask=dims < SIZE, other=0.0)[None, :]
        else:
            mask = real[:, None] & (dims < SIZE)[None, :]
            weight = tl.load(gain + apart[:, None] + dims[None, :], mask=mask, other=0.0)
        x = gained(x * inverse[:, None], weight, FORM).to(kind).to(tl.float32)
    return x


@triton.jit
def _squares_of(row, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sum of the squares of ``SIZE`` elements in a row."""
    dims = tl.arange(0, WIDTH)
    value = tl.load(row + dims, mask=dims < SIZE, other=0.0).to(tl.float32)
    return tl.sum(value * value, 0)


@triton.jit
def _apart(both, HALF_WIDTH: tl.constexpr):
    """Return the even and the odd columns of ``both [rows, 2 * HALF_WIDTH]``."""
    return tl.split(tl.reshape(both, (both.shape[0], HALF_WIDTH, 2)))


@triton.jit
def _rotated_heads(
    rows, gain, apart, squares, angles, real, eps,
    HALF: tl.constexpr, REST: tl.constexpr, HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, FORM: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return heads of one token, normalized where there is a ``gain`` and rotated, as they are rounded.

    In three parts, float32: the two halves that are rotated against each other, and the dimensions that are not. Each
    is loaded on its own, so that a thread has both halves of what it rotates and loads 16 bytes at once; where they are
    ``INTERLEAVED`` they are loaded together.

    ``squares``: the sum over all ``HEADS`` heads, which are normalized as one; None: each is normalized by itself.
    ``apart``: as in ``_gained_part``.
    """
    kind: tl.constexpr = rows.dtype.element_ty
    if INTERLEAVED:
        both = _load_part(rows, real, 2 * HALF, 2 * HALF_WIDTH)
        low, high = _apart(both, HALF_WIDTH)
    else:
        low = _load_part(rows, real, HALF, HALF_WIDTH)
        high = _load_part(rows + HALF, real, HALF, HALF_WIDTH)
    rest = _load_part(rows + 2 * HALF, real, REST, REST_WIDTH)
    if gain is not None:
        if squares is None:
            squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
        else:
            squares += tl.zeros(real.shape, tl.float32)
        inverse = tl.rsqrt(tl.div_rn(squares, HEADS * (2.0 * HALF + REST)) + eps)
        if INTERLEAVED:
            both = _gained_part(both, inverse, gain, apart, real, 2 * HALF, 2 * HALF_WIDTH, FORM, kind)
            low, high = _apart(both, HALF_WIDTH)
        else:
            low = _gained_part(low, inverse, gain, apart, real, HALF, HALF_WIDTH, FORM, kind)
            high = _gained_part(high, inverse, gain + HALF, apart, real, HALF, HALF_WIDTH, FORM, kind)
        rest = _gained_part(rest, inverse, gain + 2 * HALF, apart, real, REST, REST_WIDTH, FORM, kind)
    if HALF > 0:
        dims = tl.arange(0, HALF_WIDTH)
        cos = tl.load(angles + dims, mask=dims < HALF, other=1.0).to(tl.float32)[None, :]
        sin = tl.load(angles + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)[None, :]
        turned = low * cos - high * sin
        high = (high * cos + low * sin).to(kind).to(tl.float32)
        low = turned.to(kind).to(tl.float32)
    return low, high, rest


@triton.jit(do_not_specialize=["slots", "positions", "last"])
def _store_kernel(
    heads, rotated, table, positions, last, slots, query_gain, key_gain, eps, query_scale,
    keys, values, key_scales, value_scales,
    token_stride, head_stride, slot_stride, scale_head, scale_slot,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_WIDTH: tl.constexpr, REST_WIDTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr,
    INTERLEAVED: tl.constexpr, AS_ONE: tl.constexpr, ONE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Take a tile of one token's heads: rotate queries, or rotate and store keys and store values.

    Keys and values of a token with a negative slot are not stored. ``AS_ONE``: all queries of a token are normalized as
    one vector, and so are its keys; ``ONE_WIDTH`` is a power of two that is no less than the longer of them.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    size: tl.constexpr = 2 * HALF + REST
    tiles: tl.constexpr = tl.cdiv(QUERIES, ROWS)
    source = heads + token * token_stride
    angles = table
    if HALF > 0:
        position = tl.load(positions + token).to(tl.int64)
        angles += tl.maximum(tl.minimum(position, last), 0) * (2 * HALF)  # the positions of padding are arbitrary
    if part < tiles:
        head = part * ROWS + tl.arange(0, ROWS)
        real = head < QUERIES
        low, high, rest = _rotated_heads(
            source + head * size, query_gain, head * size if AS_ONE else None,
            _squares_of(source, QUERIES * size, ONE_WIDTH) if AS_ONE else None, angles, real, eps,
            HALF, REST, HALF_WIDTH, REST_WIDTH, FORM, QUERIES if AS_ONE else 1, INTERLEAVED,
        )  # fmt: skip
        if query_scale is not None:
            factor = tl.load(query_scale + token)
            low, high, rest = low * factor, high * factor, rest * factor
        target = rotated + token * (QUERIES * size) + head * size
        one = tl.full(real.shape, 1.0, tl.float32)
        _store_parts(target, low, high, rest, one, real, HALF, REST, HALF_WIDTH, REST_WIDTH, INTERLEAVED)
    else:
        head = (part - tiles) * ROWS + tl.arange(0, ROWS)
        slot = tl.load(slots + token).to(tl.int64)
        real = (head < KV_HEADS) & (slot >= 0)
        wide = head.to(tl.int64)  # a layer's cache may be larger than 32 bits reach
        place, scale_place = wide * head_stride + slot * slot_stride, wide * scale_head + slot * scale_slot
        row = source + (QUERIES + head) * size
        low, high, rest = _rotated_heads(
            row, key_gain, head * size if AS_ONE else None,
            _squares_of(source + QUERIES * size, KV_HEADS * size, ONE_WIDTH) if AS_ONE else None, angles, real, eps,
            HALF, REST, HALF_WIDTH, REST_WIDTH, FORM, KV_HEADS if AS_ONE else 1, INTERLEAVED,
        )  # fmt: skip
        _store_heads(
            low, high, rest, keys + place, key_scales + scale_place, real, HALF, REST, HALF_WIDTH, REST_WIDTH,
            INTERLEAVED,
        )  # fmt: skip
        value = _load_part(row + KV_HEADS * size, real, size, WIDTH)
        nothing = tl.zeros((ROWS, 1), tl.float32)
        _store_heads(
            nothing, nothing, value, values + place, value_scales + scale_place, real, 0, size, 1, WIDTH, False
        )  # fmt: skip


def store(key: Tensor, value: Tensor, slots: Tensor, stored: StoredKv) -> None:
    """Store keys and values ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``, int32; negative: nowhere."""
    _launch(torch.cat((key, value), 1), None, Turn(), slots, stored, HeadNorms())


@dataclass(frozen=True)
class HeadNorms:
    """The norms of queries and keys, where a model has them."""

    query: Tensor | None = None
    """Their weights ``[head_dim]``, or ``[heads * head_dim]`` where all heads are normalized as one vector."""
    key: Tensor | None = None
    eps: float = 0.0
    form: int = 0
    """What they do with their weights (``form_of``)."""
    as_one: bool = False


@dataclass(frozen=True)
class Turn:
    """What positions do to a step's queries and keys."""

    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines, then sines ``[positions, rotary_dim]``, contiguous, and the tokens' positions ``[tokens]``; None:
    nothing is rotated."""
    interleaved: bool = False
    """``AttentionConfig.interleaved``."""
    query_scale: Tensor | None = None
    """What queries are multiplied by ``[tokens, 1, 1]``, float32, contiguous; None: by nothing."""


def rotate_and_store(heads: Tensor, turn: Turn, slots: Tensor, stored: StoredKv, norms: HeadNorms) -> Tensor:
    """Normalize and rotate queries and keys, store keys and values, and return the queries.

    Args:
        heads: ``[tokens, heads + 2 * kv_heads, head_dim]``, queries, keys and values; each token's lie in a row.
        turn: what positions do.
        slots: int32 ``[tokens]``; negative: keys and values go nowhere.
        stored: where keys and values go.
        norms: of queries and keys.

    Returns:
        ``[tokens, heads, head_dim]``.
    """
    tokens, count, size = heads.shape
    out = torch.empty((tokens, count - 2 * len(stored.keys), size), dtype=heads.dtype, device=heads.device)
    _launch(heads, out, turn, slots, stored, norms)
    return out


def _launch(
    heads: Tensor, out: Tensor | None, turn: Turn, slots: Tensor, stored: StoredKv, norms: HeadNorms
) -> None:  # fmt: skip
    tokens, count, size = heads.shape
    kv_heads = len(stored.keys)
    queries = count - 2 * kv_heads
    table, positions = turn.rotation or (heads, slots)
    half = table.shape[1] // 2 if turn.rotation else 0
    rest = size - 2 * half
    half_width, width = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(size)
    rows = min(_ROWS, triton.next_power_of_2(max(queries, kv_heads)))
    one_width = triton.next_power_of_2(max(queries, kv_heads) * size) if norms.as_one else 1
    _store_kernel[(tokens, triton.cdiv(queries, rows) + triton.cdiv(kv_heads, rows))](
        heads, heads if out is None else out, table, positions, len(table) - 1, slots, norms.query, norms.key,
        norms.eps, turn.query_scale, stored.keys, stored.values, stored.key_scales, stored.value_scales,
        heads.stride(0), *stored.keys.stride()[:2], *stored.key_scales.stride(),
        QUERIES=queries, KV_HEADS=kv_heads, HALF=half, REST=rest, HALF_WIDTH=half_width,
        REST_WIDTH=triton.next_power_of_2(max(rest, 1)), WIDTH=width, ROWS=rows, FORM=norms.form,
        INTERLEAVED=turn.interleaved and half > 0, AS_ONE=norms.as_one, ONE_WIDTH=one_width,
        num_warps=min(4, max(1, rows * width // 512)),
    )  # fmt: skip
