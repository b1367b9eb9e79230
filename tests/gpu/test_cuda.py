"""The engine and its kernels on a CUDA device, against plain PyTorch there and transformers on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from inflight.engine.attention.store import HeadNorms, Turn, form_of, rotate_and_store, store
from inflight.engine.cuda import fp8
from inflight.engine.cuda.elementwise import FusedRmsNorm, Residual, gate
from inflight.engine.cuda.experts import FusedExperts, mix
from inflight.engine.cuda.forward import DecodeGraphs
from inflight.engine.cuda.layers import RotaryTable
from inflight.engine.engine import Engine
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models import rope
from inflight.engine.models.config import ExpertsConfig, ModelConfig
from inflight.engine.models.experts import MoeBlock, route
from inflight.engine.models.layers import Activation, AttentionOptions, GemmaRmsNorm, RmsNorm
from inflight.engine.quant.formats import to_e4m3, to_int8
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, load, run
from tests.engine.support.paged_steps import MIXED, activations, both, filled, halfway, kernels_see, ranges_of, shape
from tests.engine.support.speculating import speculating

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
PROMPTS = [tuple(range(5, 45)), (3,), (20, 30, 40), tuple(range(100, 117))]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["", "fp8", "int8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(8, 2, 128, 16, None), (4, 4, 64, 24, 8), (7, 1, 24, 16, 40), (6, 2, 80, 64, None), (2, 1, 256, 16, 8)],
)
def test_kernels(
    heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None, kind: str, dtype: torch.dtype
) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")
    config = shape(heads, kv_heads, head_dim)
    seen, expected = both(config, MIXED, block_size=block_size, window=window, dtype=dtype, kind=kind, device=CUDA)
    torch.testing.assert_close(seen, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("softcap", "sinks", "window"), [(0.7, False, None), (None, True, 128), (30.0, True, 40)])
def test_soft_caps_and_sinks(softcap: float | None, sinks: bool, window: int | None, dtype: torch.dtype) -> None:
    more = {"softcap": softcap, "sinks": sinks, "window": window}
    seen, expected = both(shape(8, 2, 64), MIXED, dtype=dtype, device=CUDA, **more)  # type: ignore[arg-type]
    torch.testing.assert_close(seen, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("one_tile", [False, True])
@pytest.mark.parametrize("tokens", [1, 9, 300, 3000])
def test_experts(tokens: int, one_tile: bool, dtype: torch.dtype) -> None:
    """Of few rows each, of many, and of so many that PyTorch sorts them."""
    config = ExpertsConfig(32, 4, 96, "softmax", True, shared_size=80, shared_gate=True)
    model = ModelConfig("", 1, 128, (), 1, 1e-6, "silu", False, False, "")
    with torch.device("meta"):
        block = MoeBlock(model, config).to(dtype)
    block.to_empty(device=CUDA).requires_grad_(False)
    torch.manual_seed(tokens)
    for parameter in block.parameters():
        parameter.normal_(0, 0.1)
    x = torch.randn(tokens, 128, device=CUDA, dtype=dtype)
    chosen, weights = route(block.gate(x), config, None)
    expected = block.mix(x, chosen, weights)
    fused = FusedExperts(block, block.shared_expert, one_tile)
    seen = mix(fused.made(x, chosen.int(), weights), None, None)
    torch.testing.assert_close(seen, expected, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    scores, picked = fused.gate(x), fused.chosen(x)[0].long()  # of equal scores PyTorch may choose either
    assert float((scores.gather(1, picked) == scores.gather(1, chosen)).float().mean()) > 0.99
    assert torch.isfinite(fused(x)).all()


def test_a_token_that_decodes_sees_the_same_whatever_its_neighbours() -> None:
    config, dtype = shape(8, 2, 128), torch.bfloat16
    ranges = ranges_of([(200, 1), (3, 1), (77, 1)], 16)
    query, key, value = activations(config, ranges, dtype, CUDA)
    options = AttentionOptions(config.attention_scale)
    together = kernels_see(filled(config, ranges, 16, dtype, "", CUDA), ranges, 16, 0, query, key, value, options)
    for row, query_range in enumerate(ranges):
        tensors, own = filled(config, ranges, 16, dtype, "", CUDA), slice(row, row + 1)
        single = [type(query_range)(0, query_range.start, 1, query_range.blocks)]
        alone = kernels_see(tensors, single, 16, 0, query[own], key[own], value[own], options)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_lies_between_products(dtype: torch.dtype) -> None:
    close = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
    torch.manual_seed(0)
    x = torch.randn(9, 12, 128, device=CUDA, dtype=dtype)
    embedding = rope.RotaryEmbedding({"rope_type": "default", "rope_theta": 1e4}, 128, 64, 64).to(CUDA)
    positions = torch.tensor([0, 5, 63, 9, 1, 1, 40, 62, 2], device=CUDA)
    rotation, angles = RotaryTable(embedding, dtype, CUDA)(positions, dtype), embedding(positions, dtype)
    slots = torch.arange(9, dtype=torch.int32, device=CUDA)
    for kind in (RmsNorm, GemmaRmsNorm):
        norm = kind(128, 1e-5).to(CUDA, dtype).requires_grad_(False)
        norm.weight.normal_()
        cache = StoredKv(*torch.zeros(2, 2, 9, 128, device=CUDA, dtype=dtype), *torch.ones(2, 2, 9, device=CUDA))
        norms = HeadNorms(norm.weight, norm.weight, 1e-5, form_of(norm))
        query = rotate_and_store(x, Turn(rotation), slots, cache, norms)
        torch.testing.assert_close(query, rope.rotate(norm(x[:, :8]), *angles), **close)
        torch.testing.assert_close(cache.keys.transpose(0, 1), rope.rotate(norm(x[:, 8:10]), *angles), **close)
        assert torch.equal(cache.values.transpose(0, 1), x[:, 10:])
        rows = x.flatten(1)
        norm = kind(rows.shape[1], 1e-5).to(CUDA, dtype).requires_grad_(False)
        norm.weight.normal_()
        torch.testing.assert_close(FusedRmsNorm(norm)(rows), norm(rows), **close)
        total, delta = rows.clone(), torch.randn_like(rows)
        seen = FusedRmsNorm(norm)(Residual(total, delta, None))
        assert torch.equal(total, rows + delta)
        torch.testing.assert_close(seen, norm(rows + delta), **close)
    for gelu in (False, True):
        torch.testing.assert_close(gate(x.flatten(1), gelu), Activation(gelu)(x.flatten(1)), **close)


def test_quotients_halfway_between_two_values_are_rounded_as_ieee_divides() -> None:
    rows = halfway().to(CUDA)
    cache = StoredKv(
        *torch.zeros(2, 1, len(rows), 256, dtype=torch.int8, device=CUDA),
        *torch.zeros(2, 1, len(rows), dtype=torch.bfloat16, device=CUDA),
    )
    store(rows[:, None], rows[:, None], torch.arange(len(rows), dtype=torch.int32, device=CUDA), cache)
    values, scales = to_int8(rows)
    assert torch.equal(cache.keys[0], values)
    assert torch.equal(cache.key_scales[0], scales[:, 0])
    if torch.cuda.get_device_capability() >= (8, 9):
        for scale in scales.float()[:, 0]:
            x = rows / 8
            assert torch.equal(fp8.quantize(x, scale).view(torch.uint8), to_e4m3(x, scale).view(torch.uint8))


def _generate(engine: Engine, count: int) -> list[list[int]]:
    requests = [ask(prompt, max_tokens=count) for prompt in PROMPTS]
    outputs = run(engine, requests)
    return [outputs[request.key].tokens for request in requests]


def _engine(name: str, **settings: Any) -> Engine:
    engine = load(checkpoint(name), device="cuda", max_batch_size=4, max_tokens_per_step=24, **settings)
    engine.warm_up()
    return engine


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8"}])
def test_graphs_compute_what_they_captured(settings: dict[str, str]) -> None:
    with_graphs, without = _engine("llama", **settings), _engine("llama", **settings)
    kernels = without._runner._kernels
    assert kernels is not None
    with torch.inference_mode():  # padded alike: cuBLAS may compute a row in another way where there are more or fewer
        kernels.graphs = DecodeGraphs(kernels.run, kernels.tables, lambda compute: compute)
    assert _generate(with_graphs, 12) == _generate(without, 12)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "log_probs": True}])
def test_steps_ahead_give_the_same_and_wait_for_nothing(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, without = _engine("llama"), _engine("llama")
    overlap, without._overlap = ahead._overlap, None
    assert overlap is not None
    launch = overlap.launch

    def watched(*arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")  # only the tokens' arrival, afterwards, may be waited for
        try:
            launch(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(overlap, "launch", watched)
    requests = [ask(prompt, max_tokens=12, **more) for prompt in PROMPTS]
    outputs, expected = run(ahead, requests), run(without, requests)
    assert [outputs[one.key].tokens for one in requests] == [expected[one.key].tokens for one in requests]
    assert overlap.launches


def test_a_draft_model_decodes_with_graphs() -> None:
    engine = speculating(device="cuda", max_batch_size=4)
    kernels = engine._speculator._drafter._runner._kernels  # type: ignore[union-attr]
    assert kernels is not None
    assert kernels.graphs is not None
    request = ask(PROMPTS[0], max_tokens=12)
    assert run(engine, [request])[request.key].tokens == greedy("llama", PROMPTS[0], 12)


def test_fp8_products() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no FP8")
    torch.manual_seed(0)
    x = 3 * torch.randn(37, 256, device=CUDA, dtype=torch.bfloat16)
    scale = torch.tensor(0.03, device=CUDA)
    rounded = fp8.quantize(x, scale)
    assert torch.equal(rounded.view(torch.uint8), to_e4m3(x, scale).view(torch.uint8))
    weight = (100 * torch.randn(128, 256, device=CUDA)).to(torch.float8_e4m3fn)
    seen = torch._scaled_mm(rounded, weight.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    expected = (rounded.float() @ weight.float().t() * scale * scale).bfloat16()
    torch.testing.assert_close(seen, expected, rtol=2e-2, atol=2e-2)
