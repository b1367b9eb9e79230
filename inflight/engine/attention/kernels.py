"""Paged attention in the Triton language: the kernels, and their launches.

One kernel serves prefill and decode. A program takes a tile of rows, each a query of one head; the heads of a group
share keys and values, so they lie in one tile and read them once. It walks over tiles of keys with a running maximum
and a running sum (FlashAttention, arXiv:2205.14135). Where rows are few, the keys are split among programs, and a
second kernel combines what they have seen (Flash-Decoding, PyTorch blog, October 2023).

Tiles of keys begin at multiples of their size and a sequence's keys are split by its own length alone: what a token
sees is added up in the same order whatever its chunk and whatever else is in the batch.

The kernels know block tables and strides, not sequences; ``kernel_attention`` prepares both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.attention.store import StoredKv

HEADER = tl.constexpr(3)
"""Columns of a span before its blocks: its first row in the packed tokens, its start in the sequence, its tokens."""
MAX_SPLITS = 32
_TILES_PER_SPLIT = 4
"""At least: a shorter split costs more than it gains."""
_EVERYTHING = 1 << 30
"""A window that no sequence exceeds."""
_VARYING = ["spans", "members", "span_tiles", "span_stride"]
"""What differs from step to step: a kernel is not to be compiled again for where it happens to lie."""
_LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=_VARYING)
def _attend_kernel(
    query, keys, values, out, peaks, spans, members, span_tiles, key_scales, value_scales, scale, window,
    query_token, query_head, keys_head, keys_slot, values_head, values_slot, scale_head, scale_slot,
    out_token, out_head, span_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, TILES_PER_SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows over the keys, or over one split of them.

    Row ``r`` of a span is its token ``r // GROUP`` in the group's head ``r % GROUP``. Without splits ``out`` is
    ``[tokens, heads, head_dim]``; with them, float32 ``[members, heads, splits, head_dim]``, and ``peaks``
    ``[members, heads, splits]`` has the base-2 logarithm of each split's sum of weights.
    """
    member, kv_head, split = tl.program_id(0) // span_tiles, tl.program_id(1), tl.program_id(2)
    span = spans + tl.load(members + member).to(tl.int64) * span_stride
    first, start, count = tl.load(span).to(tl.int64), tl.load(span + 1), tl.load(span + 2)
    first_row = tl.program_id(0) % span_tiles * ROWS
    if first_row >= count * GROUP:
        return
    rows = first_row + tl.arange(0, ROWS)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, WIDTH)
    asked = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    place = (first + token)[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    q = tl.load(query + place, mask=asked, other=0.0)
    # The keys that any row of the tile sees, in tiles.
    end = tl.minimum(start + (first_row + ROWS - 1) // GROUP, start + count - 1) + 1
    begin = tl.maximum(start + first_row // GROUP - window + 1, 0) // KEYS
    stop = tl.cdiv(end, KEYS)
    if SPLITS > 1:
        size = tl.maximum(tl.cdiv(stop - begin, SPLITS), TILES_PER_SPLIT)
        begin += split * size
        stop = tl.minimum(begin + size, stop)
    seen, peak, total = _walk(
        q, start + token, end, begin, stop, span + HEADER, scale, window,
        keys + kv_head * keys_head, keys_slot, values + kv_head * values_head, values_slot,
        key_scales + kv_head * scale_head, value_scales + kv_head * scale_head, scale_slot,
        HEAD_DIM, WIDTH, BLOCK_SIZE, ROWS, KEYS,
    )  # fmt: skip
    seen = seen / tl.where(total > 0, total, 1.0)[:, None]
    if SPLITS > 1:
        place = (member.to(tl.int64) * GROUP * tl.num_programs(1) + head) * SPLITS + split
        tl.store(peaks + place, peak + tl.log2(total), mask=token < count)
        tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], seen, mask=asked & (total > 0)[:, None])
    else:
        place = (first + token)[:, None] * out_token + head[:, None] * out_head + dims[None, :]
        tl.store(out + place, seen.to(out.dtype.element_ty), mask=asked)


@triton.jit
def _walk(
    q, own, end, begin, stop, blocks, scale, window,
    keys, keys_slot, values, values_slot, key_scales, value_scales, scale_slot,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Walk over the tiles ``begin`` to ``stop`` of keys.

    Returns the weighted sum of values ``[ROWS, WIDTH]``, and by row the largest score (base 2; minus infinity where
    nothing was seen) and the sum of weights.
    """
    dims = tl.arange(0, WIDTH)
    inside = dims < HEAD_DIM
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    seen = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(begin, stop):
        positions = tile * KEYS + tl.arange(0, KEYS)
        there = positions < end
        block = tl.load(blocks + positions // BLOCK_SIZE, mask=there, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        k = tl.load(keys + slot[None, :] * keys_slot + dims[:, None], there[None, :] & inside[:, None], other=0.0)
        key_scale = tl.load(key_scales + slot * scale_slot, there, other=0.0).to(tl.float32)
        scores = tl.dot(q, _widened(k).to(q.dtype), input_precision="ieee") * (key_scale * scale)[None, :]
        visible = (positions[None, :] <= own[:, None]) & (positions[None, :] > own[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        largest = tl.maximum(peak, tl.max(scores, 1))
        shift = tl.where(largest == float("-inf"), 0.0, largest)  # a row may see nothing of this tile
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(peak - shift)
        total = total * keep + tl.sum(weights, 1)
        v = tl.load(values + slot[:, None] * values_slot + dims[None, :], there[:, None] & inside[None, :], other=0.0)
        value_scale = tl.load(value_scales + slot * scale_slot, there, other=0.0).to(tl.float32)
        weighed = (weights * value_scale[None, :]).to(q.dtype)
        seen = seen * keep[:, None] + tl.dot(weighed, _widened(v).to(q.dtype), input_precision="ieee")
        peak = largest
    return seen, peak, total


@triton.jit
def _widened(stored):
    """Return integers as float32."""
    return stored.to(tl.float32) if stored.dtype == tl.int8 else stored


@triton.jit(do_not_specialize=_VARYING)
def _combine_kernel(
    partial, peaks, out, spans, members, out_token, out_head, span_stride,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one token's head against each other; where all are empty the result is zero."""
    member, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    place = (member * tl.num_programs(1) + head) * SPLITS + splits
    peak = tl.load(peaks + place)
    used = peak != float("-inf")
    largest = tl.max(peak, 0)
    weights = tl.exp2(peak - tl.where(largest == float("-inf"), 0.0, largest))
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    total = tl.sum(weights, 0)
    seen = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    first = tl.load(spans + tl.load(members + member).to(tl.int64) * span_stride).to(tl.int64)
    target = out + first * out_token + head * out_head + dims
    tl.store(target, seen.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def attend(
    query: Tensor, stored: StoredKv, out: Tensor, spans: Tensor, members: Tensor, longest: int, block_size: int,
    window: int | None, scale: float, splits: int = 1,
) -> None:  # fmt: skip
    """Attend over the cache with some spans of the packed tokens.

    Args:
        query: ``[tokens, heads, head_dim]``.
        stored: keys and values, those of the spans' own tokens among them.
        out: like ``query``; the rows of the spans are written.
        spans: int32 ``[spans, HEADER + blocks]``.
        members: int32 ``[members]``, which of the spans.
        longest: tokens of the longest of them.
        block_size: tokens per block.
        window: how many tokens back attention reaches, itself included; None: all.
        scale: of the scores.
        splits: of the keys, a power of two; more than one is for spans of one token.
    """
    _, heads, dim = query.shape
    kv_heads, width, keys = len(stored.keys), _width(dim), key_tile(query.dtype, dim)
    group = heads // kv_heads
    rows = _query_tile(query.dtype, dim) if longest > 1 else max(16, triton.next_power_of_2(group))
    tiles = triton.cdiv(longest * group, rows)
    parts, peaks = out, out
    if splits > 1:
        parts = torch.empty((len(members), heads, splits, dim), dtype=torch.float32, device=query.device)
        peaks = torch.empty((len(members), heads, splits), dtype=torch.float32, device=query.device)
    _attend_kernel[(len(members) * tiles, kv_heads, splits)](
        query, stored.keys, stored.values, parts, peaks, spans, members, tiles, stored.key_scales, stored.value_scales,
        scale * _LOG2_E, window or _EVERYTHING,
        *query.stride()[:2], *stored.keys.stride()[:2], *stored.values.stride()[:2],
        *stored.key_scales.stride(), *out.stride()[:2], spans.stride(0),
        GROUP=group, HEAD_DIM=dim, WIDTH=width, BLOCK_SIZE=block_size, ROWS=rows, KEYS=keys,
        SPLITS=splits, TILES_PER_SPLIT=_TILES_PER_SPLIT, num_warps=8 if rows * width >= 128 * 128 else 4,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(len(members), heads)](
            parts, peaks, out, spans, members, *out.stride()[:2], spans.stride(0),
            HEAD_DIM=dim, WIDTH=width, SPLITS=splits, num_warps=4,
        )  # fmt: skip


def num_splits(longest: int, dtype: torch.dtype, head_dim: int) -> int:
    """Return into how many parts the keys of sequences of up to ``longest`` tokens are split; a power of two."""
    wanted = triton.cdiv(longest, key_tile(dtype, head_dim) * _TILES_PER_SPLIT)
    return min(MAX_SPLITS, triton.next_power_of_2(wanted))


def key_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many keys a tile has: as many as shared memory has room for."""
    return 32 if dtype == torch.float32 or head_dim > 128 else 64


def _query_tile(dtype: torch.dtype, head_dim: int) -> int:
    """Return how many rows a tile of a chunk has: as many as shared memory has room for."""
    if dtype == torch.float32:
        return 32 if head_dim <= 128 else 16
    return 128 if head_dim <= 128 else 64


def _width(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))
