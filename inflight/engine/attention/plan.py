"""The sizes of the tiles that attention works on, and the plan that divides the work of a launch among programs.

Keys come in the same tiles wherever they are read: a token's result is added up tile by tile, so their size is part of
the result. Rows come in two sizes, since a tile of few rows reads keys as fast as memory gives them, and a tile of many
multiplies as fast as tensor cores do. The sizes are the largest at which the compiler keeps all in registers (a test
compiles them), in blocks of less than 99 KiB of shared memory, which the smallest GPUs with FP8 have. On compute
capability 9.0, which has more than twice that, the tile of many rows has three stages: on an H200 a late chunk of a
prompt took three quarters of the time of two.

A unit is what one program does for one head of keys: a tile of rows of one query range, and a run of tiles of keys. A
range that has more tiles than its share of the whole is split into several runs, so a long sequence among short ones is
spread over the card, and a full batch is not split at all. A tile of a split range leaves a part, its partial result,
which a second kernel combines with the others. The block tables and lengths are on the device, where they differ at
each replay of a captured graph, so the plan is made there as well, once for all layers of a step.

The plan does not change the result: tiles are added up one by one in the order of their positions, whichever programs
have computed them (``triton_kernels``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADER = tl.constexpr(3)
"""Columns of a range before its blocks: its first row in the packed tokens, its start in the sequence, its tokens."""
UNIT = tl.constexpr(8)
"""Columns of a unit: its range (-1: none), first row, first tile of keys, the tile after its last, and the index of its
first tile's part (-1: it leaves none, since it has all tiles of its rows); the others are for alignment."""
_UNITS, _MEMBERS = 32, 128
_VARYING = ["ranges", "members", "range_stride", "count", "shares", "max_parts"]
LONGEST_SHORT = 32
"""Ranges of no more tokens take the tile of few rows: a decoded token, drafts that are verified, a prompt's end."""


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that the choice of tiles depends on."""

    capability: int
    """Compute capability, such as 90."""
    processors: int
    """Streaming multiprocessors."""


@dataclass(frozen=True)
class Tile:
    """The sizes of an attention kernel."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Of the pipeline that loads keys and values."""


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return the card of ``device``; a small one for Triton's interpreter, which runs on the CPU."""
    if device.type != "cuda":
        return Card(80, 4)
    properties = torch.cuda.get_device_properties(device)
    return Card(10 * properties.major + properties.minor, properties.multi_processor_count)


def short_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for query ranges of one token and other short ones; ``group``: heads that share keys."""
    return Tile(_least(group), _keys(dtype, head_dim), 8 if dtype == torch.float32 else 4, 2)


def long_tile(card: Card, dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for the chunks of prompts."""
    if 90 <= card.capability < 120 and dtype != torch.float32 and head_dim <= 128:
        stages = 3 if card.capability == 90 else 2  # their tensor cores read from shared memory
        return Tile(128, _keys(dtype, head_dim), 8, stages)
    return common_tile(dtype, head_dim, group)


def common_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for all query ranges where a token's bits must not depend on which tile it is in.

    In 16 bits it is slower than the others: too many rows for one token, and on some cards too few for a long prompt.
    """
    return Tile(max(_least(group), 16 if dtype == torch.float32 else 64), _keys(dtype, head_dim), 8, 2)


def _least(group: int) -> int:
    """Return the rows of the smallest tile that can be multiplied and has all heads of a token."""
    return max(16, triton.next_power_of_2(group))


def _keys(dtype: torch.dtype, head_dim: int) -> int:
    return 32 if dtype == torch.float32 or head_dim > 128 else 64


@dataclass(frozen=True)
class AttentionPlan:
    """The units of one launch."""

    units: Tensor
    """int32 ``[units, UNIT]``."""
    bases: Tensor
    """int32 ``[members]``: the index of the first part of a member's first tile of rows; -1: it is not split."""
    members: Tensor
    """int32 ``[members]``: which of the step's query ranges they are."""
    longest: int
    """Tokens of the longest of them."""
    max_parts: int
    """How many parts there is room for."""
    tile: Tile
    window: int | None


@triton.jit
def _work_of(
    ranges, members, range_stride, which, count,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return each member's query range, its number of tiles of rows, its first tile of keys, and how many it has."""
    there = (which >= 0) & (which < count)
    index = tl.load(members + which, mask=there, other=0)
    entry = ranges + index.to(tl.int64) * range_stride
    start = tl.load(entry + 1, mask=there, other=-1)
    tokens = tl.load(entry + 2, mask=there, other=0)
    first = tl.maximum(start - WINDOW + 1, 0) // KEYS if WINDOW else start * 0
    return index, tl.cdiv(tokens * GROUP, ROWS), first, tl.cdiv(start + tokens, KEYS) - first


@triton.jit(do_not_specialize=_VARYING)
def _plan_kernel(
    units, bases, ranges, members, range_stride, count, shares, max_parts,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write some of the units; the first program writes all bases."""
    total = 0
    for at in range(0, count, MEMBERS):
        _, row_tiles, _, tiles = _work_of(
            ranges, members, range_stride, at + tl.arange(0, MEMBERS), count, WINDOW, GROUP, ROWS, KEYS
        )
        total += tl.sum(row_tiles * tiles, 0)
    share = tl.maximum(tl.cdiv(total, shares), 1)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    member = tl.full((UNITS,), -1, tl.int32)  # of each unit, as are the next three
    rank, base, runs = unit * 0, unit * 0, unit * 0
    before, used = 0, 0
    for at in range(0, count, MEMBERS):
        which = at + tl.arange(0, MEMBERS)
        _, row_tiles, _, tiles = _work_of(ranges, members, range_stride, which, count, WINDOW, GROUP, ROWS, KEYS)
        wanted = tl.where(tiles > share, row_tiles * tiles, 0)
        ends = used + tl.cumsum(wanted, 0)
        split = (wanted > 0) & (ends <= max_parts)
        parts = tl.where(split, tl.cdiv(tiles, share), 1)
        after = before + tl.cumsum(row_tiles * parts, 0)
        begins = after - row_tiles * parts
        if tl.program_id(0) == 0:
            tl.store(bases + which, tl.where(split, ends - wanted, -1), mask=which < count)
        mine = (unit[:, None] >= begins[None, :]) & (unit[:, None] < after[None, :])
        member += tl.sum(tl.where(mine, which[None, :] + 1, 0), 1)
        rank += tl.sum(tl.where(mine, unit[:, None] - begins[None, :], 0), 1)
        base += tl.sum(tl.where(mine, (ends - wanted)[None, :], 0), 1)
        runs += tl.sum(tl.where(mine, parts[None, :], 0), 1)
        before += tl.sum(row_tiles * parts, 0)
        used += tl.sum(wanted, 0)
    index, row_tiles, first, tiles = _work_of(ranges, members, range_stride, member, count, WINDOW, GROUP, ROWS, KEYS)
    runs = tl.maximum(runs, 1)
    row_tile = row_tiles - 1 - rank // runs  # the last rows have the most keys: they go first
    size = tl.cdiv(tiles, runs)
    begin = rank % runs * size
    place = units + unit * UNIT
    tl.store(place, tl.where(member >= 0, index, -1))
    tl.store(place + 1, row_tile * ROWS)
    tl.store(place + 2, first + begin)
    tl.store(place + 3, first + tl.minimum(begin + size, tiles))
    tl.store(place + 4, tl.where(runs > 1, base + row_tile * tiles + begin, -1))


def plan(
    ranges: Tensor, members: Tensor, longest: int, tile: Tile, group: int, window: int | None, shares: int = 1,
    max_parts: int = 0,
) -> AttentionPlan:  # fmt: skip
    """Divide the work of a launch among its programs.

    Args:
        ranges: int32 ``[ranges, HEADER + blocks]``.
        members: int32 ``[members]``, which of the query ranges.
        longest: tokens of the longest of them.
        tile: of the kernel.
        group: heads that share keys.
        window: how many tokens back attention reaches, itself included; None: all.
        shares: among how many programs of each head of keys.
        max_parts: how many parts there is room for; 0: nothing is split.
    """
    count = len(members)
    most = count * triton.cdiv(longest * group, tile.rows) + (shares if max_parts else 0)
    programs = triton.cdiv(most, _UNITS)
    units = torch.empty((programs * _UNITS, UNIT.value), dtype=torch.int32, device=ranges.device)
    bases = torch.empty(count, dtype=torch.int32, device=ranges.device)
    _plan_kernel[(programs,)](
        units, bases, ranges, members, ranges.stride(0), count, shares, max_parts,
        WINDOW=window or 0, GROUP=group, ROWS=tile.rows, KEYS=tile.keys, UNITS=_UNITS, MEMBERS=_MEMBERS, num_warps=4,
    )  # fmt: skip
    return AttentionPlan(units[:most], bases, members, longest, max_parts, tile, window)
