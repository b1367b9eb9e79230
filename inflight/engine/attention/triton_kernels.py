"""Paged attention in the Triton language: the kernels, and their launches.

One kernel serves prefill and decode. A program takes a tile of rows, each a query of one head; the heads of a group
share keys and values, so they lie in one tile and read them once. The program walks over tiles of keys (FlashAttention,
arXiv:2205.14135). Where rows are few, the tiles of keys are divided among programs, and a second kernel combines
their partial results (Flash-Decoding, PyTorch blog, October 2023).

There is one order of sums. Tiles of keys begin at multiples of their size. A row's partial result over a tile, with its
largest score and its sum of weights, depends on the row and the tile alone. ``_fold`` adds the tiles up one by one
in the order of their positions, in the program that has computed them or in the kernel that combines. So a token's
result is the same whether it is alone or in a chunk, whatever else is in the batch, and however many programs its keys
are divided among (``plan``). No multiply-add is fused unless the code says so: the compiler would choose differently in
each kernel.

The hardware decides how a tile is multiplied, and in which order a tile's weights are added up: both follow from the
tile's rows. With ``plan.common_tile`` these are equal too.

The kernels take block tables and strides, not sequences; ``triton_backend`` prepares both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.attention.plan import HEADER, UNIT, AttentionPlan, Tile
from inflight.engine.kvcache.memory_pool import StoredKv

_PART_BYTES = 256 << 20
"""Bytes for parts, at most: ranges whose parts do not fit are not split, and are then what a launch waits for. An 8B
model's parts of a million tokens fit."""
_VARYING = ["ranges", "units", "members", "range_stride", "longest"]
"""Arguments that differ from step to step: a kernel must not be compiled again for their alignment or value."""
_LOG2_E = 1.4426950408889634
_LOG2_E_KERNEL = tl.constexpr(_LOG2_E)
_SUMS = tl.constexpr(4)
"""Columns of a part after its values: the largest score (base 2) and the sum of weights; two are for alignment."""
_UNROLLED = 16
"""Parts that are loaded at once."""


@triton.jit(do_not_specialize=_VARYING)
def _attend_kernel(
    query, keys, values, out, parts, ranges, units, key_scales, value_scales, sinks, scale, squeeze,
    query_token, keys_head, keys_slot, scale_head, scale_slot, range_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of rows over the tiles of keys of one unit.

    Row ``r`` of a range is its token ``r // GROUP`` in the group's head ``r % GROUP``. ``PLACES`` is how many rows of a
    tile leave parts ``[parts, kv_heads, PLACES, HEAD_DIM + _SUMS]``; 0: nothing is split.
    """
    unit = units + tl.program_id(0) * UNIT
    index = tl.load(unit)
    if index < 0:
        return
    first_row, begin, stop, part_0 = tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3), tl.load(unit + 4)
    kv_head = tl.program_id(1).to(tl.int64)  # times a stride it may exceed 32 bits
    entry = ranges + index.to(tl.int64) * range_stride
    first, start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    rows = first_row + tl.arange(0, ROWS)
    token, head, dims = rows // GROUP, kv_head * GROUP + rows % GROUP, tl.arange(0, WIDTH)
    asked = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    place = (first + token)[:, None] * query_token + head[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + place, mask=asked, other=0.0)
    # The unit ends behind the last tile that any row attends to; every row attends to all keys of tiles before `full`.
    end = tl.minimum(start + (first_row + ROWS - 1) // GROUP, start + count - 1) + 1
    part = (part_0 - begin).to(tl.int64)  # of tile 0, if the unit had it
    stop = tl.minimum(stop, tl.cdiv(end, KEYS))
    full = begin
    if WINDOW:
        begin = tl.maximum(begin, tl.maximum(start + first_row // GROUP - WINDOW + 1, 0) // KEYS)
        full = begin
    elif ROWS > 16:
        full = tl.minimum(tl.maximum((start + first_row // GROUP + 1) // KEYS, begin), stop)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    peak, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    stored = (keys + kv_head * keys_head, values + kv_head * keys_head, keys_slot,
              key_scales + kv_head * scale_head, value_scales + kv_head * scale_head, scale_slot)  # fmt: skip
    slots = _slots_of(entry + HEADER, begin, end, BLOCK_SIZE, KEYS)
    if ROWS > 16 and not WINDOW:
        for tile in range(begin, full):
            one = _attend_tile(
                q, start + token, end, tile, slots, stored, scale, squeeze, HEAD_DIM, WIDTH, KEYS, WINDOW, True, CAPPED
            )
            if PLACES:
                _store_part(parts, part + tile, kv_head, part_0 >= 0, rows - first_row, one, HEAD_DIM, WIDTH, PLACES)
            peak, total, acc = _fold(peak, total, acc, one[0], one[1], one[2])
            slots = _slots_of(entry + HEADER, tile + 1, end, BLOCK_SIZE, KEYS)
    for tile in range(full, stop):
        one = _attend_tile(
            q, start + token, end, tile, slots, stored, scale, squeeze, HEAD_DIM, WIDTH, KEYS, WINDOW, False, CAPPED
        )
        if PLACES:
            _store_part(parts, part + tile, kv_head, part_0 >= 0, rows - first_row, one, HEAD_DIM, WIDTH, PLACES)
        peak, total, acc = _fold(peak, total, acc, one[0], one[1], one[2])
        slots = _slots_of(entry + HEADER, tile + 1, end, BLOCK_SIZE, KEYS)
    if sinks is not None:
        peak, total, acc = _fold_sink(peak, total, acc, tl.load(sinks + head))
    place = ((first + token) * tl.num_programs(1) * GROUP + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, _result(total, acc).to(out.dtype.element_ty), mask=asked & (part_0 < 0))


@triton.jit
def _slots_of(blocks, tile, end, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Return the slots of a tile's keys."""
    positions = tile * KEYS + tl.arange(0, KEYS)
    block = tl.load(blocks + positions // BLOCK_SIZE, mask=positions < end, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _attend_tile(
    q, own, end, tile, slots, stored, scale, squeeze,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, FULL: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to one tile of keys; ``FULL``: no row is masked in it; ``CAPPED``: scores are squeezed first.

    Returns by row the largest score (base 2; minus infinity where all keys are masked), the sum of weights, and the
    weighted sum of values ``[ROWS, WIDTH]``.
    """
    keys, values, keys_slot, key_scales, value_scales, scale_slot = stored
    dims, positions = tl.arange(0, WIDTH), tile * KEYS + tl.arange(0, KEYS)
    there = (positions < end) | FULL
    inside = there[:, None] & (dims < HEAD_DIM)[None, :]
    place = slots[:, None] * keys_slot + dims[None, :]
    scores = tl.dot(q, _widened(tl.load(keys + place, inside, other=0.0)).to(q.dtype).T, input_precision="ieee")
    plain: tl.constexpr = keys.dtype.element_ty == q.dtype
    if not plain:
        scores *= tl.load(key_scales + slots * scale_slot, there, other=0.0).to(tl.float32)[None, :]
    if CAPPED:
        scores = _tanh(scores * squeeze)
    if not FULL:
        visible = positions[None, :] <= own[:, None]
        if WINDOW:
            visible &= positions[None, :] > own[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    peak = tl.max(scores, 1) * scale
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # a row may have no visible key in this tile
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    total = tl.sum(weights, 1)
    if not plain:
        weights *= tl.load(value_scales + slots * scale_slot, there, other=0.0).to(tl.float32)[None, :]
    v = _widened(tl.load(values + place, inside, other=0.0)).to(q.dtype)
    return peak, total, tl.dot(weights.to(q.dtype), v, input_precision="ieee")


@triton.jit
def _fold(peak, total, acc, peak_of_tile, total_of_tile, acc_of_tile):
    """Return the result up to a tile, that tile included."""
    largest = tl.maximum(peak, peak_of_tile)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    keep, weight = tl.exp2(peak - shift), tl.exp2(peak_of_tile - shift)
    total = tl.fma(total_of_tile, weight, total * keep)
    return largest, total, tl.fma(acc_of_tile, weight[:, None], acc * keep[:, None])


@triton.jit
def _fold_sink(peak, total, acc, sink):
    """Return the result with a score that takes a share and gives nothing."""
    sink = sink.to(tl.float32) * _LOG2_E_KERNEL
    return _fold(peak, total, acc, sink, tl.full(total.shape, 1.0, tl.float32), tl.zeros_like(acc))


@triton.jit
def _tanh(x):
    return 1.0 - tl.div_rn(2.0, tl.exp2(x * (2.0 * _LOG2_E_KERNEL)) + 1.0)


@triton.jit
def _result(total, acc):
    """Return the weighted sum divided by the sum of weights; zero where all keys were masked."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _store_part(
    parts, part, kv_head, split, row, one, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Store the partial result of one tile for the kernel that combines."""
    dims = tl.arange(0, WIDTH)
    place = parts + ((part * tl.num_programs(1) + kv_head) * PLACES + row) * (HEAD_DIM + _SUMS)
    there = (row < PLACES) & split
    tl.store(place[:, None] + dims[None, :], one[2], mask=there[:, None] & (dims < HEAD_DIM)[None, :])
    tl.store(place + HEAD_DIM, one[0], mask=there)
    tl.store(place + HEAD_DIM + 1, one[1], mask=there)


@triton.jit
def _widened(stored):
    """Return integers as float32."""
    return stored.to(tl.float32) if stored.dtype == tl.int8 else stored


@triton.jit(do_not_specialize=_VARYING)
def _combine_kernel(
    parts, out, ranges, members, bases, sinks, range_stride, longest,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PLACES: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Fold the partial results of one token's head, if its tiles were divided among programs."""
    member, token = tl.program_id(0) // longest, tl.program_id(0) % longest
    base = tl.load(bases + member)
    if base < 0:
        return
    entry = ranges + tl.load(members + member).to(tl.int64) * range_stride
    first, start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2)
    if token >= count:
        return
    head = tl.program_id(1).to(tl.int64)
    row = token * GROUP + head % GROUP
    begin, of_range = start * 0, start * 0
    if WINDOW:
        of_range = tl.maximum(start - WINDOW + 1, 0) // KEYS
        begin = tl.maximum(start + token - WINDOW + 1, 0) // KEYS
    stop = (start + token) // KEYS + 1
    tiles = tl.cdiv(start + count, KEYS) - of_range
    part = (base + row // ROWS * tiles - of_range).to(tl.int64)
    kv_heads = tl.num_programs(1) // GROUP
    dims = tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros((1, WIDTH), tl.float32)
    peak, total = tl.full((1,), float("-inf"), tl.float32), tl.zeros((1,), tl.float32)
    for at in range(begin, stop, UNROLLED):
        for ahead in tl.static_range(UNROLLED):
            tile = at + ahead + tl.arange(0, 1)
            place = ((part + tile) * kv_heads + head // GROUP) * PLACES + row % ROWS
            place, there = parts + place * (HEAD_DIM + _SUMS), tile < stop
            one = tl.load(place[:, None] + dims, mask=there[:, None] & (dims < HEAD_DIM), other=0.0)
            peak_of_tile = tl.load(place + HEAD_DIM, mask=there, other=float("-inf"))
            total_of_tile = tl.load(place + HEAD_DIM + 1, mask=there, other=0.0)
            peak, total, acc = _fold(peak, total, acc, peak_of_tile, total_of_tile, one)
    if sinks is not None:
        peak, total, acc = _fold_sink(peak, total, acc, tl.load(sinks + head + tl.arange(0, 1)))
    target = out + ((first + token) * tl.num_programs(1) + head) * HEAD_DIM + dims
    tl.store(target, _result(total, acc).to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def attend(
    query: Tensor, stored: StoredKv, out: Tensor, ranges: Tensor, plan: AttentionPlan, block_size: int, scale: float,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Attend over the cache with some query ranges of the packed tokens.

    Args:
        query: ``[tokens, heads, head_dim]``; it is copied where a token's heads do not lie together.
        stored: keys and values, those of the query ranges' own tokens among them; both with the same strides.
        out: contiguous, otherwise like ``query``; the rows of the plan's members are written.
        ranges: int32 ``[ranges, HEADER + blocks]``.
        plan: which of the ranges, their window, and what each program does.
        block_size: tokens per block.
        scale: of the scores; positive.
        softcap, sinks: those of ``layers.AttentionOptions``.
    """
    _, heads, dim = query.shape
    kv_heads, tile, parts = len(stored.keys), plan.tile, out
    if query.stride()[1:] != (dim, 1):
        query = query.contiguous()
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    places = _places(plan.longest, group, tile) if plan.max_parts else 0
    if places:
        shape = (plan.max_parts, kv_heads, places, dim + _SUMS.value)
        parts = torch.empty(shape, dtype=torch.float32, device=query.device)
    sizes = {"GROUP": group, "HEAD_DIM": dim, "WIDTH": width, "WINDOW": plan.window or 0}
    sizes |= {"ROWS": tile.rows, "KEYS": tile.keys, "PLACES": places}
    _attend_kernel[(len(plan.units), kv_heads)](
        query, stored.keys, stored.values, out, parts, ranges, plan.units, stored.key_scales, stored.value_scales,
        sinks, (softcap or scale) * _LOG2_E, scale / (softcap or 1.0),
        query.stride(0), *stored.keys.stride()[:2], *stored.key_scales.stride(), ranges.stride(0),
        BLOCK_SIZE=block_size, **sizes, CAPPED=softcap is not None,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    if places:
        _combine_kernel[(len(plan.members) * plan.longest, heads)](
            parts, out, ranges, plan.members, plan.bases, sinks, ranges.stride(0), plan.longest,
            **sizes, UNROLLED=_UNROLLED, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def room_for_parts(longest: int, group: int, kv_heads: int, head_dim: int, tile: Tile, tiles: int) -> int:
    """Return how many of the parts of ``tiles`` there is room for; ``longest``: tokens of the longest range."""
    part = 4 * kv_heads * _places(longest, group, tile) * (head_dim + _SUMS.value)
    return min(tiles, _PART_BYTES // part)


def _places(longest: int, group: int, tile: Tile) -> int:
    """Return how many rows of a tile may have parts."""
    return group if longest == 1 else tile.rows
