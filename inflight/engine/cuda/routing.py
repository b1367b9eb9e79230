"""Which experts a token has, and which rows of a step each expert multiplies: all on the device, nothing waits for it.

``experts.route`` is the reference for the choice. What was chosen is dealt out in tiles of rows: a tile has one expert,
and its rows are pairs of a token and a place among the token's experts, in the order of the tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.models.config import ExpertsConfig

TILE = tl.constexpr(4)
"""Columns of a tile: its expert (-1: there is no tile), its first place in the order, and the place after its expert's
last; one is for alignment."""
_MOST_PAIRS = 4096
"""Pairs that one program sorts; more are sorted by PyTorch."""
_PAIRS = 128


class Dealt(NamedTuple):
    """The rows of a step, dealt out to experts."""

    order: Tensor
    """int32 ``[pairs]``: the pairs, those of one expert in a row. Pair ``p`` is of token ``p // per_token``."""
    tiles: Tensor
    """int32 ``[tiles, TILE]``: as many as there may be."""


def choose(scores: Tensor, config: ExpertsConfig, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, as ``experts.route`` does, whose arguments these are; of equals the first ones.

    Returns:
        The experts of each token ``[tokens, per_token]``, int32, best first, and their weights, float32.
    """
    tokens, experts = scores.shape
    chosen = torch.empty((tokens, config.per_token), dtype=torch.int32, device=scores.device)
    weights = torch.empty((tokens, config.per_token), dtype=torch.float32, device=scores.device)
    _choose_kernel[(tokens,)](
        scores, correction, chosen, weights, config.scale,
        EXPERTS=experts, WIDTH=triton.next_power_of_2(experts), CHOSEN=config.per_token, ROUTING=config.routing,
        NORMALIZED=config.normalized, GROUPS=config.groups, GROUP_WIDTH=triton.next_power_of_2(config.groups),
        GROUPS_CHOSEN=config.groups_per_token, GROUP_BEST=config.group_best, num_warps=1 if experts <= 128 else 4,
    )  # fmt: skip
    return chosen, weights


def deal(chosen: Tensor, experts: int, rows: int) -> Dealt:
    """Deal out what tokens have chosen ``[tokens, per_token]``, int32, in tiles of so many rows."""
    pairs = chosen.numel()
    most = min(pairs, experts) + pairs // rows
    tiles = torch.empty((most, TILE.value), dtype=torch.int32, device=chosen.device)
    sizes = {"WIDTH": triton.next_power_of_2(experts), "ROWS": rows}
    if pairs <= _MOST_PAIRS:
        order = torch.empty(pairs, dtype=torch.int32, device=chosen.device)
        block = min(_PAIRS, triton.next_power_of_2(pairs))
        _deal_kernel[(1,)](chosen, order, tiles, pairs, most, PAIRS=block, **sizes, num_warps=4)
        return Dealt(order, tiles)
    by_expert, order = chosen.view(-1).sort(stable=True)
    every = torch.arange(sizes["WIDTH"], dtype=torch.int32, device=chosen.device)
    ends = torch.searchsorted(by_expert, every, right=True, out_int32=True)
    _tiles_kernel[(1,)](ends, tiles, most, **sizes, num_warps=4)
    return Dealt(order.int(), tiles)


@triton.jit
def _best(values, places, SIZE: tl.constexpr):
    """Return the largest of ``values [width]`` and its place, the first of equals and below ``SIZE`` in any case."""
    best = tl.max(values, 0)
    place = tl.min(tl.where(values == best, places, SIZE - 1), 0)
    return best, place


@triton.jit
def _of_best_groups(
    values, experts, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUP_WIDTH: tl.constexpr,
    GROUPS_CHOSEN: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Return ``values [width]`` with minus infinity where the group is not one of the best."""
    size: tl.constexpr = EXPERTS // GROUPS
    groups = tl.arange(0, GROUP_WIDTH)
    of_groups = tl.full((GROUP_WIDTH,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        left = tl.where(experts // size == group, values, float("-inf"))
        total = 0.0
        for _ in tl.static_range(GROUP_BEST):
            best, place = _best(left, experts, EXPERTS)
            total += best
            left = tl.where(experts == place, float("-inf"), left)
        of_groups = tl.where(groups == group, total, of_groups)
    kept = experts < 0
    for _ in tl.static_range(GROUPS_CHOSEN):
        _, group = _best(of_groups, groups, GROUPS)
        kept |= experts // size == group
        of_groups = tl.where(groups == group, float("-inf"), of_groups)
    return tl.where(kept, values, float("-inf"))


@triton.jit
def _choose_kernel(
    scores, correction, chosen, weights, scale,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, ROUTING: tl.constexpr, NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_WIDTH: tl.constexpr, GROUPS_CHOSEN: tl.constexpr, GROUP_BEST: tl.constexpr,
):  # fmt: skip
    """Choose one token's experts."""
    token, experts = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there = experts < EXPERTS
    kind: tl.constexpr = scores.dtype.element_ty
    own = tl.load(scores + token * EXPERTS + experts, mask=there, other=float("-inf")).to(tl.float32)
    given = own
    if ROUTING == "softmax":
        powers = tl.exp(own - tl.max(own, 0))
        given = tl.div_rn(powers, tl.sum(powers, 0))
    elif ROUTING == "sigmoid":
        given = tl.sigmoid(own)
    left = given
    if correction is not None:
        left += tl.load(correction + experts, mask=there, other=0.0).to(tl.float32)
    left = tl.where(there, left, float("-inf"))
    if GROUPS > 1:
        left = _of_best_groups(left, experts, EXPERTS, GROUPS, GROUP_WIDTH, GROUPS_CHOSEN, GROUP_BEST)
    places: tl.constexpr = triton.next_power_of_2(CHOSEN)
    order = tl.arange(0, places)
    picked, shares = tl.zeros((places,), tl.int32), tl.full((places,), float("-inf"), tl.float32)
    for place in tl.static_range(CHOSEN):
        _, expert = _best(left, experts, EXPERTS)
        share = tl.max(tl.where(experts == expert, given, float("-inf")), 0)
        picked, shares = tl.where(order == place, expert, picked), tl.where(order == place, share, shares)
        left = tl.where(experts == expert, float("-inf"), left)
    real = order < CHOSEN
    if ROUTING == "chosen_softmax":
        powers = tl.exp(shares - tl.max(shares, 0))
        shares = tl.div_rn(powers, tl.sum(powers, 0)).to(kind).to(tl.float32)
    elif ROUTING == "input_sigmoid":
        shares = tl.sigmoid(shares)
    else:
        if NORMALIZED:
            shares = tl.div_rn(shares, tl.sum(tl.where(real, shares, 0.0), 0) + 1e-20)
        shares *= scale
    tl.store(chosen + token * CHOSEN + order, picked, mask=real)
    tl.store(weights + token * CHOSEN + order, shares, mask=real)


@triton.jit
def _store_tiles(tiles, begins, ends, experts, most, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write the tiles of all experts, whose places in the order begin and end there."""
    own = tl.cdiv(ends - begins, ROWS)
    first = tl.cumsum(own, 0) - own
    for at in range(tl.max(own, 0)):
        entry, there = tiles + (first + at) * TILE, at < own
        tl.store(entry, experts, mask=there)
        tl.store(entry + 1, begins + at * ROWS, mask=there)
        tl.store(entry + 2, ends, mask=there)
    for at in range(tl.sum(own, 0), most, WIDTH):
        tl.store(tiles + (at + experts) * TILE, -1, mask=at + experts < most)


@triton.jit(do_not_specialize=["pairs", "most"])
def _deal_kernel(
    chosen, order, tiles, pairs, most, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Count each expert's pairs, put them in order, and write the tiles."""
    experts = tl.arange(0, WIDTH)
    counts = tl.zeros((WIDTH,), tl.int32)
    for at in range(0, pairs, PAIRS):
        pair = at + tl.arange(0, PAIRS)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=WIDTH)
        counts += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    ends = tl.cumsum(counts, 0)
    filled = ends - counts
    for at in range(0, pairs, PAIRS):
        pair = at + tl.arange(0, PAIRS)
        expert = tl.load(chosen + pair, mask=pair < pairs, other=WIDTH)
        mine = (expert[:, None] == experts[None, :]).to(tl.int32)
        place = tl.sum(mine * (tl.cumsum(mine, 0) - 1 + filled[None, :]), 1)
        tl.store(order + place, pair, mask=pair < pairs)
        filled += tl.sum(mine, 0)
    _store_tiles(tiles, ends - counts, ends, experts, most, WIDTH, ROWS)


@triton.jit(do_not_specialize=["most"])
def _tiles_kernel(ends, tiles, most, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write the tiles of pairs that are in order; ``ends [WIDTH]``: the place after each expert's last."""
    experts = tl.arange(0, WIDTH)
    end = tl.load(ends + experts)
    begin = tl.load(ends + experts - 1, mask=experts > 0, other=0)
    _store_tiles(tiles, begin, end, experts, most, WIDTH, ROWS)
