"""Matrix products that add a row up in one order, however many rows there are (``engine.batch_invariant``).

cuBLAS chooses an algorithm by the number of rows, and some of its algorithms split a row's sum. Here the number of rows
chooses between two tiles only, and a sum is never split: each program adds up the whole depth for its tile, in steps of
the tensor core's instruction. On compute capability 9.0 that is one instruction for both tiles (``wgmma``), and they
give the same bits (``tests/gpu/test_batch_invariance.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from inflight.engine.quant.convert import DecodedLinear


@dataclass(frozen=True)
class ProductTile:
    """The sizes of the kernel."""

    rows: int
    columns: int
    depth: int
    """Inputs that a step of the loop multiplies."""
    warps: int
    stages: int
    masked: bool = True
    """Whether rows and columns that do not exist are left out, not read as the last ones."""


FEW_ROWS = ProductTile(64, 32, 128, 4, 6)
"""For decoding: a weight is read as fast as memory gives it, by enough programs to fill the card."""
MANY_ROWS = ProductTile(128, 128, 64, 4, 4, masked=False)
"""For prompts: tensor cores are kept busy."""
_MOST_FEW = 256
"""Rows up to which the tile of few is faster on an H100: a matrix of 4,096 columns has only 32 tiles of the other."""
_FLOAT32 = ProductTile(16, 32, 32, 4, 2)
_GROUP = 8
"""Tiles of rows that follow each other with the same columns of the weight, which then come from the L2 cache."""


class InvariantLinear(nn.Module):
    """A linear in place of one whose product is cuBLAS's."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, prepared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """``prepared`` rounds inputs as the checkpoint's scheme does."""
        super().__init__()
        self.weight, self.bias, self._prepared = weight, bias, prepared

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return product(x if self._prepared is None else self._prepared(x), self.weight, self.bias)


def use_invariant_products(model: nn.Module) -> int:
    """Put these products in place of all linears of a loaded model that are not quantized; return how many.

    Those of experts have kernels of their own (``experts``).
    """
    found = [
        (name, one)
        for name, one in model.named_modules()
        if isinstance(one, nn.Linear | DecodedLinear) and ".experts." not in name
    ]
    for name, one in found:
        prepared = one.prepared if isinstance(one, DecodedLinear) else None
        model.set_submodule(name, InvariantLinear(one.weight, one.bias, prepared))
    return len(found)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: ProductTile | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, added up in float32.

    Args:
        x: ``[rows, depth]``.
        weight: ``[columns, depth]``, contiguous, of the type of ``x``.
        bias: ``[columns]``.
        tile: in place of the one that is chosen by the number of rows.
    """
    (rows, depth), columns = x.shape, len(weight)
    x = x.contiguous()
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or _tile(x.dtype, rows)
    programs = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    _product_kernel[(programs,)](
        x, weight, out if bias is None else bias, out, rows, columns, depth,
        HAS_BIAS=bias is not None, WHOLE=depth % tile.depth == 0, MASKED=tile.masked, GROUP=_GROUP,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _tile(dtype: torch.dtype, rows: int) -> ProductTile:
    if dtype == torch.float32:
        return _FLOAT32
    return FEW_ROWS if rows <= _MOST_FEW else MANY_ROWS


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, weight, bias, out, rows, columns, depth,
    HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result.

    ``WHOLE``: the depth is a multiple of ``DEPTH``. ``MASKED``: rows beyond the last one, which are most of a tile
    where rows are few, are not read; otherwise the last row is read in their place.
    """
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles)
    in_group = tl.minimum(row_tiles - group * GROUP, GROUP)
    rank = tl.program_id(0) % (GROUP * column_tiles)
    row = (group * GROUP + rank % in_group) * ROWS + tl.arange(0, ROWS)
    column = rank // in_group * COLUMNS + tl.arange(0, COLUMNS)
    asked, held = (row < rows)[:, None], (column < columns)[:, None]
    if not MASKED:
        asked, held = True, True
        left = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * depth
        right = weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * depth
    else:
        left, right = x + row.to(tl.int64)[:, None] * depth, weight + column.to(tl.int64)[:, None] * depth
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, depth, DEPTH):
        deep = (begin + tl.arange(0, DEPTH))[None, :]
        if WHOLE and not MASKED:
            a, b = tl.load(left + deep), tl.load(right + deep)
        else:
            inside = WHOLE | (deep < depth)
            a, b = tl.load(left + deep, asked & inside, other=0.0), tl.load(right + deep, held & inside, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    there = (row < rows)[:, None] & (column < columns)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=there)
