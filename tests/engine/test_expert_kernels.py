"""Experts by kernels, in Triton's interpreter, against the experts of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from inflight.engine.cuda import experts as experts_module
from inflight.engine.cuda import routing
from inflight.engine.cuda.experts import ExpertTile, FusedExperts, takes
from inflight.engine.cuda.routing import choose, deal
from inflight.engine.models.config import ExpertsConfig, ModelConfig
from inflight.engine.models.experts import MoeBlock, route

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's; a GPU says nothing
HIDDEN = 40
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"routing": "softmax"},
    "normalized": {"routing": "softmax", "normalized": True, "scale": 1.7},
    "groups": {"routing": "softmax", "groups": 3, "groups_per_token": 2, "group_best": 1},
    "sigmoid": {"routing": "sigmoid", "normalized": True, "groups": 3, "groups_per_token": 2, "scale": 1.3},
    "gpt-oss": {"routing": "chosen_softmax", "bias": True, "clamp": 0.8},
    "of the input": {"routing": "input_sigmoid", "per_token": 1},
    "shared": {"routing": "softmax", "shared_size": 24},
    "shared, gate": {"routing": "softmax", "shared_size": 24, "shared_gate": True},
}
each = pytest.mark.parametrize("kind", KINDS)


def _block(kind: str, dtype: torch.dtype, activation: str = "silu") -> MoeBlock:
    given = {"num_experts": 9, "per_token": 3, "intermediate_size": 20, "normalized": False} | KINDS[kind]
    config = ExpertsConfig(**given)
    model = ModelConfig("", 8, HIDDEN, (), 8, 1e-5, activation, False, False, "")
    with torch.device("meta"):
        block = MoeBlock(model, config).to(dtype)
    block.to_empty(device="cpu").requires_grad_(False)
    torch.manual_seed(len(kind))
    for parameter in block.parameters():
        parameter.copy_(torch.randn(parameter.shape) / 3)
    return block


def _inputs(tokens: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(tokens)
    return torch.randn(tokens, HIDDEN).to(dtype)


def _fused(block: MoeBlock, one_tile: bool = False) -> FusedExperts:
    shared = block.shared_expert if block.config.shared_size else None
    return FusedExperts(block, shared, one_tile)


@pytest.mark.sweep
@each
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_a_layer_s_experts(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    block, x = _block(kind, dtype), _inputs(7, dtype)
    expected = block(x)
    seen = _fused(block)(x)
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)
    assert not [one for expert in block.experts for one in expert.parameters()], "their weights are held twice"


def test_another_activation() -> None:
    block, x = _block("softmax", torch.float32, "gelu_pytorch_tanh"), _inputs(3, torch.float32)
    expected = block(x)
    torch.testing.assert_close(_fused(block)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep(most=3)
@each
def test_the_choice(kind: str) -> None:
    block = _block(kind, torch.float32)
    scores = block.gate(_inputs(40, torch.float32))
    seen, expected = choose(scores, block.config, block.correction), route(scores, block.config, block.correction)
    assert torch.equal(seen[0].long(), expected[0])
    torch.testing.assert_close(seen[1], expected[1], rtol=1e-6, atol=1e-7)


def test_scores_that_are_no_numbers_choose_some_expert() -> None:
    block = _block("sigmoid", torch.float32)
    chosen, _ = choose(torch.full((2, 9), torch.nan), block.config, block.correction)
    assert ((chosen >= 0) & (chosen < 9)).all()


@pytest.mark.parametrize("most", [4096, 0])
@pytest.mark.parametrize("tokens", [1, 90])
def test_rows_are_dealt_out_in_the_order_of_tokens(tokens: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one program, and by PyTorch's sort."""
    monkeypatch.setattr(routing, "_MOST_PAIRS", most)
    monkeypatch.setattr(routing, "_PAIRS", 32)
    torch.manual_seed(tokens)
    chosen = torch.stack([torch.randperm(11)[:2] for _ in range(tokens)]).int()
    chosen[chosen == 4] = 5  # nobody chose one of them
    order, tiles = deal(chosen, 12, 4)
    pairs = chosen.flatten().tolist()
    assert order.tolist() == sorted(range(len(pairs)), key=lambda pair: pairs[pair])
    expected = []
    for expert in range(12):
        begin, end = (sum(one < bound for one in pairs) for bound in (expert, expert + 1))
        expected += [[expert, at, end] for at in range(begin, end, 4)]
    assert tiles[: len(expected), :3].tolist() == expected
    assert (tiles[len(expected) :, 0] == -1).all()


@pytest.mark.proof
@pytest.mark.usefixtures("rows_are_multiplied_alike")
def test_a_token_gets_the_same_alone_and_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = _block("sigmoid", torch.float32), _inputs(30, torch.float32)
    chosen, weights = choose(block.gate(x), block.config, block.correction)
    fused = _fused(block)
    together = fused.made(x, chosen, weights)
    for row in (slice(0, 1), slice(13, 14), slice(29, 30), slice(7, 20)):
        assert torch.equal(fused.made(x[row], chosen[row], weights[row]), together[row])
    monkeypatch.setattr(experts_module, "_FLOAT32", ExpertTile(32, 16, 16, 4, 2))
    torch.testing.assert_close(fused.made(x, chosen, weights), together, rtol=1e-5, atol=1e-5)


def test_the_tile_follows_from_the_rows_of_an_expert() -> None:
    sizes = [experts_module.tile_of(torch.bfloat16, pairs, 128).rows for pairs in (8, 2048, 8192, 65_536)]
    assert sizes == [16, 16, 64, 128]
    assert {experts_module.tile_of(torch.bfloat16, pairs, 128, True).rows for pairs in (8, 65_536)} == {64}


def test_what_rounds_inputs_is_left_to_pytorch() -> None:
    block = _block("softmax", torch.float32)
    assert takes(block)
    block.experts[2].down_proj = torch.nn.Identity()
    assert not takes(block)
