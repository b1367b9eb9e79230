"""How the work of one attention launch is dealt out among programs, on the device.

A unit is what one program does for one head of keys: a tile of rows of one span, and a run of tiles of keys. A span
whose tiles are more than its share of all that there are is split into several runs, so a long sequence among short
ones is spread over the card, and a full batch is not split at all. The tables and lengths are on the device, where a
captured graph finds them changed at each replay, so the plan is made there as well, once for all layers of a step.

It decides nothing about the result: tiles are added up one by one in the order of their positions, whichever programs
have seen them (``kernels``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.attention.tiles import Tile

HEADER = tl.constexpr(3)
"""Columns of a span before its blocks: its first row in the packed tokens, its start in the sequence, its tokens."""
UNIT = tl.constexpr(8)
"""Columns of a unit: its span (-1: none), first row, first tile of keys, the tile after its last, and where the first
tile's part goes (-1: the unit has all tiles of its rows); the others are for alignment."""
_UNITS, _MEMBERS = 32, 128
_VARYING = ["spans", "members", "span_stride", "count", "shares", "slots"]


@dataclass(frozen=True)
class Plan:
    """The units of one launch."""

    units: Tensor
    """int32 ``[units, UNIT]``."""
    bases: Tensor
    """int32 ``[members]``: where the parts of a member's first tile of rows begin; -1: it is not split."""
    members: Tensor
    """int32 ``[members]``: which of the step's spans they are."""
    longest: int
    """Tokens of the longest of them."""
    slots: int
    """Tiles that there is room for to leave as parts."""
    tile: Tile
    window: int | None


@triton.jit
def _work_of(
    spans, members, span_stride, which, count,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return of some members the span, its tiles of rows, and the first and the number of its tiles of keys."""
    there = (which >= 0) & (which < count)
    index = tl.load(members + which, mask=there, other=0)
    span = spans + index.to(tl.int64) * span_stride
    start = tl.load(span + 1, mask=there, other=-1)
    tokens = tl.load(span + 2, mask=there, other=0)
    first = tl.maximum(start - WINDOW + 1, 0) // KEYS if WINDOW else start * 0
    return index, tl.cdiv(tokens * GROUP, ROWS), first, tl.cdiv(start + tokens, KEYS) - first


@triton.jit(do_not_specialize=_VARYING)
def _plan_kernel(
    units, bases, spans, members, span_stride, count, shares, slots,
    WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    UNITS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write some of the units; the first program writes all bases."""
    total = 0
    for at in range(0, count, MEMBERS):
        _, row_tiles, _, tiles = _work_of(
            spans, members, span_stride, at + tl.arange(0, MEMBERS), count, WINDOW, GROUP, ROWS, KEYS
        )
        total += tl.sum(row_tiles * tiles, 0)
    share = tl.maximum(tl.cdiv(total, shares), 1)
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    member = tl.full((UNITS,), -1, tl.int32)  # of each unit, and what is known of it
    rank, base, runs = unit * 0, unit * 0, unit * 0
    before, used = 0, 0
    for at in range(0, count, MEMBERS):
        which = at + tl.arange(0, MEMBERS)
        _, row_tiles, _, tiles = _work_of(spans, members, span_stride, which, count, WINDOW, GROUP, ROWS, KEYS)
        wanted = tl.where(tiles > share, row_tiles * tiles, 0)
        ends = used + tl.cumsum(wanted, 0)
        split = (wanted > 0) & (ends <= slots)
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
    index, row_tiles, first, tiles = _work_of(spans, members, span_stride, member, count, WINDOW, GROUP, ROWS, KEYS)
    runs = tl.maximum(runs, 1)
    row_tile = row_tiles - 1 - rank // runs  # the last rows see the most keys: they go first
    size = tl.cdiv(tiles, runs)
    begin = rank % runs * size
    place = units + unit * UNIT
    tl.store(place, tl.where(member >= 0, index, -1))
    tl.store(place + 1, row_tile * ROWS)
    tl.store(place + 2, first + begin)
    tl.store(place + 3, first + tl.minimum(begin + size, tiles))
    tl.store(place + 4, tl.where(runs > 1, base + row_tile * tiles + begin, -1))


def plan(
    spans: Tensor, members: Tensor, longest: int, tile: Tile, group: int, window: int | None, shares: int = 1,
    slots: int = 0,
) -> Plan:  # fmt: skip
    """Deal the work out.

    Args:
        spans: int32 ``[spans, HEADER + blocks]``.
        members: int32 ``[members]``, which of the spans.
        longest: tokens of the longest of them.
        tile: of the kernel.
        group: heads that share keys.
        window: how many tokens back attention reaches, itself included; None: all.
        shares: among how many programs of each head of keys.
        slots: tiles that there is room for to leave as parts; 0: nothing is split.
    """
    count = len(members)
    most = count * triton.cdiv(longest * group, tile.rows) + (shares if slots else 0)
    programs = triton.cdiv(most, _UNITS)
    units = torch.empty((programs * _UNITS, UNIT.value), dtype=torch.int32, device=spans.device)
    bases = torch.empty(count, dtype=torch.int32, device=spans.device)
    _plan_kernel[(programs,)](
        units, bases, spans, members, spans.stride(0), count, shares, slots,
        WINDOW=window or 0, GROUP=group, ROWS=tile.rows, KEYS=tile.keys, UNITS=_UNITS, MEMBERS=_MEMBERS, num_warps=4,
    )  # fmt: skip
    return Plan(units[:most], bases, members, longest, slots, tile, window)
