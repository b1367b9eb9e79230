"""Mixture of Experts by kernels: the products of all experts of a layer are two launches, whoever was chosen.

Weights of a layer's experts lie in one tensor. A program multiplies one tile of rows by some columns of its expert's
weight (``routing.deal``) and adds the whole depth up, in one order; so nothing on the host depends on what was chosen,
and a step that only decodes can be captured. What a token's experts give is added up from the best to the last. All is
rounded where ``models.experts``, the reference, rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from inflight.engine.cuda.elementwise import activated
from inflight.engine.cuda.routing import TILE, Dealt, choose, deal
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.layers import Activation, GatedMlp, each_of
from inflight.engine.quant.convert import DecodedLinear

_BLOCK = 1024


@dataclass(frozen=True)
class ExpertTile:
    """The sizes of the kernel that multiplies."""

    rows: int
    columns: int
    """Of the result; of gate and up as many each."""
    depth: int
    """Inputs that a step of the loop multiplies."""
    warps: int
    stages: int


FEW_ROWS = ExpertTile(16, 32, 128, 4, 4)
"""For decoding: weights are read as fast as memory gives them."""
SOME_ROWS = ExpertTile(64, 64, 64, 4, 3)
MANY_ROWS = ExpertTile(128, 64, 64, 8, 3)
"""For prompts: tensor cores are kept busy."""
_FLOAT32 = ExpertTile(16, 32, 32, 4, 2)


def tile_of(dtype: torch.dtype, pairs: int, experts: int, one_tile: bool = False) -> ExpertTile:
    """Return the tile for so many pairs of a token and an expert; ``one_tile``: the same for any number."""
    if dtype == torch.float32:
        return _FLOAT32
    each = pairs / experts
    if one_tile or FEW_ROWS.rows < each <= SOME_ROWS.rows:
        return SOME_ROWS
    return FEW_ROWS if each <= FEW_ROWS.rows else MANY_ROWS


class FusedExperts(nn.Module):
    """``experts.MoeBlock``."""

    def __init__(self, block: MoeBlock, shared: nn.Module | None, one_tile: bool = False) -> None:
        """Take over the experts of ``block``, for whom ``takes`` holds; it has none of them afterwards.

        ``shared`` is what all tokens take besides; ``one_tile``: as in ``tile_of``.
        """
        super().__init__()
        self.config, self.gate, self.correction, self.shared = block.config, block.gate, block.correction, shared
        self.shared_gate = block.shared_expert_gate if block.config.shared_gate else None
        first = block.experts[0]
        assert isinstance(first, GatedMlp)
        self.activation, self._one_tile = first.activation, one_tile
        self.gate_up, self.gate_up_bias = _stacked([one.gate_up_proj for one in block.experts])  # type: ignore[union-attr, misc]
        self.down, self.down_bias = _stacked([one.down_proj for one in block.experts])  # type: ignore[union-attr, misc]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]`` of ``x``, contiguous."""
        made = self.made(x, *self.chosen(x))
        shared = None if self.shared is None else self.shared(x)
        return mix(made, shared, None if self.shared_gate is None else self.shared_gate(x))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, and their weights; see ``choose``."""
        return choose(self.gate(x), self.config, self.correction)

    def made(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what each of a token's experts gives ``[tokens, per_token, hidden]``; see ``choose``."""
        config, scales_input = self.config, self.config.routing == "input_sigmoid"
        tile = tile_of(x.dtype, chosen.numel(), config.num_experts, self._one_tile)
        dealt = deal(chosen, config.num_experts, tile.rows)
        inner = gated_product(
            x, self.gate_up, self.gate_up_bias, dealt, tile, config.per_token, self.activation,
            weights if scales_input else None,
        )  # fmt: skip
        made = product(inner, self.down, self.down_bias, dealt, tile, None if scales_input else weights)
        return made.view(*chosen.shape, -1)


def takes(model: nn.Module) -> bool:
    """Whether kernels can multiply by all experts of a loaded model: weights are decoded, and inputs not rounded."""
    experts = [expert for _, block in each_of(model, MoeBlock) for expert in block.experts]
    linears = [linear for expert in experts for linear in expert.children()]
    return all(
        isinstance(one, nn.Linear) or (isinstance(one, DecodedLinear) and one.prepared is None) for one in linears
    )


def _stacked(linears: list[nn.Linear]) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return the weights of linears, and their biases, in one tensor each; the linears give theirs up."""
    made: list[nn.Parameter | None] = []
    for name in ("weight", "bias"):
        first: Tensor | None = getattr(linears[0], name)
        if first is None:
            made.append(None)
            continue
        whole = torch.empty((len(linears), *first.shape), dtype=first.dtype, device=first.device)
        for place, linear in zip(whole, linears, strict=True):
            place.copy_(getattr(linear, name))
            setattr(linear, name, None)
        made.append(nn.Parameter(whole, requires_grad=False))
    weight, bias = made
    assert weight is not None
    return weight, bias


def gated_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dealt: Dealt, tile: ExpertTile, per_token: int,
    activation: Activation, weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the activation of each pair's gate times its up projection ``[pairs, inner]``.

    Args:
        x: ``[tokens, hidden]``, contiguous.
        weight, bias: ``[experts, 2 * inner, hidden]`` and ``[experts, 2 * inner]``, gates first.
        dealt: in tiles of ``tile.rows``.
        tile: of the kernel.
        per_token: experts of a token.
        activation: of the experts.
        weights: of each pair, by which its input is multiplied first; None: by nothing.
    """
    inner, hidden = weight.shape[1] // 2, weight.shape[2]
    out = torch.empty((len(dealt.order), inner), dtype=x.dtype, device=x.device)
    clamp = activation.clamp
    _launch(
        x, weight, bias, out, dealt, tile, weights, inner, hidden, PER_TOKEN=per_token, GATED=True, OF_INPUT=True,
        GELU=activation.gelu, CLAMP=0.0 if clamp is None else clamp, SLOPE=activation.slope,
    )  # fmt: skip
    return out


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dealt: Dealt, tile: ExpertTile, weights: Tensor | None
) -> Tensor:  # fmt: skip
    """Return each pair's product ``[pairs, hidden]``, times its weight.

    Args:
        x: ``[pairs, inner]``, contiguous.
        weight, bias: ``[experts, hidden, inner]`` and ``[experts, hidden]``.
        dealt: in tiles of ``tile.rows``.
        tile: of the kernel.
        weights: of each pair, by which the result is multiplied; None: by nothing.
    """
    hidden, inner = weight.shape[1:]
    out = torch.empty((len(x), hidden), dtype=x.dtype, device=x.device)
    _launch(
        x, weight, bias, out, dealt, tile, weights, hidden, inner, PER_TOKEN=1, GATED=False, OF_INPUT=False,
        GELU=False, CLAMP=0.0, SLOPE=1.0,
    )  # fmt: skip
    return out


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, dealt: Dealt, tile: ExpertTile, weights: Tensor | None,
    width: int, size: int, **kind: object,
) -> None:  # fmt: skip
    if not len(dealt.order):
        return
    most = len(dealt.tiles)
    _expert_kernel[(most * triton.cdiv(width, tile.columns),)](
        x, weight, bias, out, dealt.order, dealt.tiles, weights, most, **kind, WIDTH=width, SIZE=size,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["most"])
def _expert_kernel(
    x, weight, bias, out, order, tiles, weights, most,
    PER_TOKEN: tl.constexpr, GATED: tl.constexpr, OF_INPUT: tl.constexpr, GELU: tl.constexpr, CLAMP: tl.constexpr,
    SLOPE: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute some columns of one tile of rows; tiles that follow each other have the same columns."""
    entry = tiles + (tl.program_id(0) % most) * TILE
    expert = tl.load(entry)
    if expert < 0:
        return
    place = tl.load(entry + 1) + tl.arange(0, ROWS)
    real = place < tl.load(entry + 2)
    pair = tl.load(order + place, mask=real, other=0)
    column = (tl.program_id(0) // most) * COLUMNS + tl.arange(0, COLUMNS)
    held = column < WIDTH
    kind: tl.constexpr = x.dtype.element_ty
    source = x + (pair // PER_TOKEN).to(tl.int64)[:, None] * SIZE
    rows: tl.constexpr = WIDTH * 2 if GATED else WIDTH
    target = weight + (expert.to(tl.int64) * rows + column)[:, None] * SIZE
    if weights is not None:
        share = tl.load(weights + pair, mask=real, other=0.0)[:, None]
    first, second = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, SIZE, DEPTH):
        deep = begin + tl.arange(0, DEPTH)[None, :]
        inside = deep < SIZE
        a = tl.load(source + deep, mask=real[:, None] & inside, other=0.0)
        if OF_INPUT and weights is not None:
            a = (a.to(tl.float32) * share).to(kind)
        there = held[:, None] & inside
        first = tl.dot(a, tl.load(target + deep, mask=there, other=0.0).T, first, input_precision="ieee")
        if GATED:
            other = tl.load(target + WIDTH * SIZE + deep, mask=there, other=0.0)
            second = tl.dot(a, other.T, second, input_precision="ieee")
    if bias is not None:
        of_expert = bias + expert.to(tl.int64) * rows + column
        first += tl.load(of_expert, mask=held, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(of_expert + WIDTH, mask=held, other=0.0).to(tl.float32)[None, :]
    result = first.to(kind).to(tl.float32)
    if GATED:
        result = activated(result, second.to(kind).to(tl.float32), GELU, CLAMP, SLOPE)
    elif weights is not None:
        result *= share
    at = pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, result.to(kind), mask=real[:, None] & held[None, :])


def mix(made: Tensor, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Add up what a token's experts give, and what all tokens take besides.

    Args:
        made: ``[tokens, per_token, hidden]``, contiguous.
        shared: ``[tokens, hidden]``, contiguous; None: nothing.
        gate: ``[tokens, 1]``, by whose sigmoid ``shared`` is multiplied; None: it is not.
    """
    tokens, per_token, hidden = made.shape
    out = torch.empty((tokens, hidden), dtype=made.dtype, device=made.device)
    _mix_kernel[(tokens, triton.cdiv(hidden, _BLOCK))](
        made, shared, gate, out, hidden, PER_TOKEN=per_token, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _mix_kernel(made, shared, gate, out, hidden, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < hidden
    kind: tl.constexpr = out.dtype.element_ty
    own = made + token * PER_TOKEN * hidden + dims
    total = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    for place in tl.static_range(1, PER_TOKEN):
        total = (total + tl.load(own + place * hidden, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    if shared is not None:
        more = tl.load(shared + token * hidden + dims, mask=inside, other=0.0).to(tl.float32)
        if gate is not None:
            share = tl.sigmoid(tl.load(gate + token).to(tl.float32)).to(kind).to(tl.float32)
            more = (share * more).to(kind).to(tl.float32)
        total += more
    tl.store(out + token * hidden + dims, total.to(kind), mask=inside)
