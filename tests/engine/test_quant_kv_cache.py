"""The FP8 KV cache, and quantized inputs: a request's tokens do not depend on how the engine came to them."""

from __future__ import annotations

import functools
import logging

import pytest
import torch

from inflight.engine.checkpoint import load_config
from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.kvcache.memory_pool import Fp8KvPool, KvPool, KvScales
from inflight.engine.request import Output
from inflight.engine.scoring import Scorer
from inflight.settings.kv_cache import KvCacheSettings
from tests.engine.support.checkpoints import PROMPTS, TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.quantized import VOCAB, Quantized, quantized
from tests.support.pairs import pairwise

COUNT = 12
CPU = torch.device("cpu")
WAYS = {
    "preempted": {"max_tokens_per_step": 24, "num_blocks": 64, "policy": "max_utilization"},
    "batched": {},
    "chunked": {"max_tokens_per_step": 24, "num_blocks": 64},
    "one token per step": {"max_tokens_per_step": 1, "prefix_reuse": False},
}
# Rounded inputs and keys and values; rounded keys and values alone; not calibrated for it; rounded inputs alone.
MODELS = {
    "FP8, FP8 cache": ("FP8", True, "auto"),
    "AWQ, FP8 cache": ("AWQ", True, "auto"),
    "original, FP8 cache": ("none", False, "fp8"),
    "NVFP4": ("NVFP4", False, "auto"),
    "SmoothQuant": ("SmoothQuant", False, "auto"),
}


def _model(name: str) -> tuple[Quantized, str]:
    scheme, fp8_kv_cache, dtype = MODELS[name]
    return quantized(scheme, fp8_kv_cache=fp8_kv_cache), dtype


@functools.cache
def _alone(name: str, cpu_step: str) -> list[tuple[list[int], torch.Tensor]]:
    """Return tokens and logits of each prompt, computed one after the other, each at once."""
    model, dtype = _model(name)
    engine = load(model.directory, kv_cache_dtype=dtype, max_batch_size=1, prefix_reuse=False, cpu_step=cpu_step)
    requests = [ask(prompt, COUNT, generation_logits=True) for prompt in PROMPTS]
    outputs = run(engine, requests)
    return [_result(outputs[request.key]) for request in requests]


def _result(output: Output) -> tuple[list[int], torch.Tensor]:
    assert output.generation_logits is not None
    return output.tokens, torch.stack([torch.as_tensor(row) for row in output.generation_logits])


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize(("name", "way", "cpu_step"), pairwise(list(MODELS), list(WAYS), ["auto", "pytorch"]))
def test_tokens_do_not_depend_on_the_way(name: str, way: str, cpu_step: str) -> None:
    """Twice, so that prefixes are reused; logits too, to the last digits: nothing was rounded to another value."""
    model, dtype = _model(name)
    engine = load(model.directory, kv_cache_dtype=dtype, cpu_step=cpu_step, **WAYS[way])
    reused = preemptions = 0
    for _ in range(1 if way == "one token per step" else 2):
        prompts = PROMPTS[:6] if way == "one token per step" else PROMPTS
        requests = [ask(prompt, COUNT, generation_logits=True) for prompt in prompts]
        outputs = run(engine, requests)
        for request, (tokens, logits) in zip(requests, _alone(name, cpu_step), strict=False):
            ours, scores = _result(outputs[request.key])
            assert ours == tokens
            torch.testing.assert_close(scores, logits, atol=2e-5, rtol=1e-5)
        metrics = [output.metrics for output in outputs.values() if output.metrics]
        reused += sum(one.cached_tokens for one in metrics)
        preemptions += sum(one.preemptions for one in metrics)
    assert (reused > 0) == (way != "one token per step")
    assert (preemptions > 0) == (way == "preempted")


def test_copies_of_blocks_are_exact() -> None:
    """Sequences of one request share a block until they differ."""
    model, _ = _model("FP8, FP8 cache")
    prompt = TOKENS[:18]
    engine = load(model.directory)
    request = ask(prompt, COUNT)
    expected = run(engine, [request])[request.key].tokens
    for length in (17, 18):  # with a prefix that ends inside a block
        again = ask(prompt[:length] + TOKENS[60:64], COUNT)
        alone = ask(again.prompt, COUNT)
        assert run(engine, [again])[again.key].tokens == run(load(model.directory), [alone])[alone.key].tokens
    request = ask(prompt, COUNT)
    assert run(engine, [request])[request.key].tokens == expected


def test_a_copied_block_is_the_same_bytes() -> None:
    kv = _tensors(torch.rand(3) + 0.1)
    kv.write(0, torch.arange(4), torch.randn(4, 2, 32), torch.randn(4, 2, 32))
    kv.copy([BlockCopy(0, 5)])
    for ours, theirs in zip(kv.read(0, torch.arange(4)), kv.read(0, torch.arange(20, 24)), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()


def _tensors(scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> Fp8KvPool:
    config = load_config(quantized("none").directory)
    return Fp8KvPool(config, 8, 4, dtype, CPU, KvScales(scales, scales))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored(dtype: torch.dtype) -> None:
    """Nearest multiples of the layer's own scale; too large ones saturate; the type read is that of the computation."""
    kv = _tensors(torch.tensor([0.5, 2.0, 1.0]), dtype)
    key = torch.tensor([1.03, 1000.0, -1000.0, 0.0]).to(dtype)[:, None, None].expand(4, 2, 32)
    for layer, expected in ((0, [1.0, 224.0, -224.0, 0.0]), (1, [1.0, 896.0, -896.0, 0.0])):
        kv.write(layer, torch.arange(4), key, -key)
        keys, values = kv.read(layer, torch.arange(4))
        assert keys.dtype is dtype
        assert keys[0, :, 0].tolist() == expected
        assert torch.equal(values, -keys)


def test_memory_is_half_that_of_bfloat16() -> None:
    config = load_config(quantized("none").directory)
    full = KvPool(config, 8, 4, torch.bfloat16, CPU)
    assert _tensors(torch.ones(3)).nbytes * 2 == full.nbytes == 2 * full.parts[0].nbytes


def test_the_deployment_and_the_checkpoint_decide(caplog: pytest.LogCaptureFixture) -> None:
    """auto: FP8 where the checkpoint is meant for it; fp8: always. The log says which, and what is how large."""
    seen = []
    with caplog.at_level(logging.INFO):
        for scheme, calibrated, dtype in (("FP8", True, "auto"), ("FP8", False, "auto"), ("none", False, "fp8")):
            caplog.clear()
            settings = KvCacheSettings(dtype=dtype)  # type: ignore[arg-type]
            load(quantized(scheme, fp8_kv_cache=calibrated).directory, kv_cache_dtype=settings.dtype)
            seen.append(" ".join(caplog.messages))
    assert "quantization FP8, weights of 0.7 MiB" in seen[0]
    assert "KV cache in float8_e4m3fn: " in seen[0]
    assert "1024 tokens, 0.4 MiB" in seen[0]
    assert "KV cache in float32: " in seen[1]
    assert "1024 tokens, 1.5 MiB" in seen[1]
    assert "quantization none, weights of 2.0 MiB" in seen[2]
    assert "KV cache in float8_e4m3fn: " in seen[2]


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("kind", ["keys", "values"])
def test_each_layer_has_scales_of_its_own(kind: str, layer: int) -> None:
    """One that is far too small saturates, and only there."""
    scorer = Scorer(quantized("FP8", fp8_kv_cache=True).directory, "float64", device="cpu")
    right = scorer.logits(TOKENS)
    scales = getattr(scorer.kv_scales, kind)
    scales[layer] /= 256
    assert (scorer.logits(TOKENS) - right).abs().max() > 1e-2


def test_a_cache_without_scales_has_ones() -> None:
    scorer = Scorer(quantized("none").directory, "float64", "fp8", device="cpu")
    scales = scorer.kv_scales
    assert scales is not None
    assert (scales.keys.tolist(), scales.values.tolist()) == ([1.0] * 3, [1.0] * 3)
    plain = Scorer(quantized("none").directory, "float64", device="cpu").logits(TOKENS)
    assert 1e-3 < (scorer.logits(TOKENS) - plain).abs().max() < 3
    assert scorer.logits(TOKENS).shape == (len(TOKENS), VOCAB)
