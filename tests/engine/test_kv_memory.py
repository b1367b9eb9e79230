"""The KV cache's types and size: what each holds in the same bytes, what it loses, and the arithmetic in the log."""

from __future__ import annotations

import functools
import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from inflight.engine import device
from inflight.engine import sizing as memory
from inflight.engine.checkpoint import load_config, load_model, outline_model
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.kvcache.memory_pool import Int8KvPool, KvPool
from inflight.engine.quant.formats import to_int8
from inflight.engine.scoring import Scorer
from inflight.engine.speculate.draft_model import DraftModel
from inflight.errors import DeploymentError
from inflight.export.data import DataSet, Source
from inflight.export.stages import Journal
from inflight.export.verify.measures import measure
from inflight.resources import HELD_OUT_DATA
from inflight.serve.command import KV_CACHE_LINE
from inflight.settings.deployment import validate
from inflight.settings.speculation import SpeculationSettings
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.checkpoints import PROMPTS, checkpoint
from tests.engine.support.driving import ask, load, run
from tests.support.progress import silent

DEMO = Path(__file__).parents[2] / "deployments/demo/model"
CPU = torch.device("cpu")
COUNT = 12


def test_int8_rounds_each_row_by_its_largest_value() -> None:
    x = torch.randn(5, 3, 16) * torch.logspace(-6, 6, 15).view(5, 3, 1)
    values, scales = to_int8(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.bfloat16, (5, 3, 1))
    error = (values.float() * scales.float() - x).abs().amax(-1)
    assert (error <= x.abs().amax(-1) / 127 * 0.6).all(), "half a step, and what the scale's own rounding adds"
    assert (to_int8(torch.zeros(1, 4))[0] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_stays_none(bad: float) -> None:
    """The engine must see it: it never shares such a block."""
    values, scales = to_int8(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    read = values.float() * scales
    assert not read[0].isfinite().any()
    assert read[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_has_the_computations_type(dtype: torch.dtype) -> None:
    config = load_config(checkpoint("llama"))
    key, value = torch.randn(2, 3, config.num_kv_heads, config.head_dim).to(dtype)
    for tensors, error in (
        (Int8KvPool(config, 4, 4, dtype, CPU), 0.05),
        (KvPool(config, 4, 4, dtype, CPU, torch.bfloat16, True), 0.02),
        (KvPool(config, 4, 4, dtype, CPU, torch.float32, False), 0.0),
    ):
        tensors.write(1, torch.tensor([7, 2, 9]), key, value)
        for read, written in zip(tensors.read(1, torch.tensor([7, 2, 9])), (key, value), strict=True):
            assert read.dtype is dtype
            torch.testing.assert_close(read, written.transpose(0, 1), atol=error, rtol=0)


WAYS: dict[str, dict[str, Any]] = {
    "preempted": {"max_tokens_per_step": 24, "num_blocks": 64, "policy": "max_utilization"},
    "chunked and reused": {"max_tokens_per_step": 24, "num_blocks": 64},
}


@functools.cache
def _alone(dtype: str) -> list[list[int]]:
    engine = load(checkpoint("llama"), kv_cache_dtype=dtype, max_batch_size=1, prefix_reuse=False)
    requests = [ask(prompt, COUNT) for prompt in PROMPTS]
    outputs = run(engine, requests)
    return [outputs[request.key].tokens for request in requests]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_the_way(way: str, dtype: str) -> None:
    """Computed in float32, stored smaller: in any batch, in chunks, found in the cache or lost and computed again."""
    engine = load(checkpoint("llama"), kv_cache_dtype=dtype, **WAYS[way])
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in PROMPTS]
        outputs = run(engine, requests)
        assert [outputs[request.key].tokens for request in requests] == _alone(dtype)
    assert (engine.stats.preemptions > 0) == (way == "preempted")
    assert engine.stats.cached_tokens > 0


@pytest.mark.proof
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_quality_stays_within_one_percent(dtype: Literal["int8", "fp8"]) -> None:
    """Of the demo model's perplexity on held-out answers, without calibration."""
    original = Scorer(DEMO, "float32", "float32", device="cpu")
    examples = DataSet([Source(HELD_OUT_DATA)], 30).examples(Tokenizer.from_checkpoint(DEMO), original.max_length)
    stored = Scorer(DEMO, "float32", dtype, device="cpu")
    found = measure(original, stored, examples, [], (), silent, Journal())
    assert 0 < abs(found.perplexity_increase) < 0.01
    assert 0 < found.kl_divergence < (0.0005 if dtype == "int8" else 0.01)


def test_the_same_bytes_hold_twice_the_tokens() -> None:
    """Of bfloat16: INT8 pays two bytes of scale for each head's ``head_dim``."""
    budget = 4 << 20
    tokens = {
        dtype: (engine := load(DEMO, dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_bytes=budget))
        and _capacity(engine)
        for dtype in ("bfloat16", "fp8", "int8")
    }
    head_dim = load_config(DEMO).head_dim
    assert tokens["fp8"] == pytest.approx(2 * tokens["bfloat16"], rel=0.01)
    assert tokens["int8"] == pytest.approx(2 * tokens["bfloat16"] * head_dim / (head_dim + 2), rel=0.01)


def _capacity(engine: Engine) -> int:
    config = engine._runner.config
    assert engine._cache.num_blocks == config.num_blocks == engine.stats.state().kv_blocks_max
    assert config.kv_cache_bytes is not None
    assert engine._runner._kv_pool.nbytes <= config.kv_cache_bytes
    return config.num_blocks * config.block_size


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"num_blocks": 100},
            "KV cache in float32: 2 x 3 layers x 2 heads x (16 x 4) bytes = 768 bytes per token; 100 blocks of 4 "
            "tokens: 400 tokens, 0.3 MiB; of the longest sequences, 400 tokens, 1 fit at once",
        ),
        (
            {"kv_cache_bytes": 1 << 20, "kv_cache_dtype": "int8", "max_sequence_length": 100},
            "KV cache in int8: 2 x 3 layers x 2 heads x (16 x 1 + 2) bytes = 216 bytes per token; 1213 blocks of 4 "
            "tokens: 4852 tokens, 1.0 MiB; of the longest sequences, 100 tokens, 48 fit at once",
        ),
    ],
)
def test_the_log_has_the_arithmetic(settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = load(checkpoint("llama"), offload_to="host", offload_bytes=1 << 20, **settings)
    assert said in caplog.messages
    tensors: KvPool = engine._runner._kv_pool
    per_token = tensors.nbytes // (engine._runner.config.num_blocks * 4)
    assert f" = {per_token} bytes per token" in said
    pages = (1 << 20) // (4 * per_token)
    assert f"KV cache, second tier in the host's memory: {pages} blocks, {pages * 4} tokens, 1.0 MiB" in caplog.messages
    shown = [KV_CACHE_LINE.findall(line) for line in ("a KV: " + json.dumps({"m": one}) for one in caplog.messages)]
    assert [line for found in shown for line in found] == [one for one in caplog.messages if "KV cache" in one]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek3", "KV cache in float32: 1 x 3 layers x 1 heads x (32 x 4) bytes = 384 bytes per token"),
        (
            "gemma4, shared",
            "2 x 2 layers x 2 heads x (16 x 4) + 2 x 1 layers x 2 heads x (24 x 4) bytes = 896 bytes per token",
        ),
    ],
)
def test_the_arithmetic_of_layers_that_differ(name: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Latent attention stores one part; layers that share the keys and values of another store none."""
    with caplog.at_level(logging.INFO):
        load(checkpoint(name), num_blocks=100)
    assert said in caplog.text


def test_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 << 20 < device.free_memory(CPU) < 1 << 50
    monkeypatch.setattr(memory, "free_memory", lambda _: 8 << 20)
    engine = load(checkpoint("llama"), kv_cache_fraction=0.25)
    assert engine._cache.num_blocks == (2 << 20) // (4 * 768)
    request = ask(PROMPTS[0], COUNT)
    assert len(run(engine, [request])[request.key].tokens) == COUNT


def test_a_share_of_what_the_draft_model_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights come first, and a block of its cache beside each of the model's."""
    free = 32 << 20
    monkeypatch.setattr(memory, "free_memory", lambda _: free)
    drafts = SpeculationSettings(method="draft_target", draft_model=checkpoint("qwen3"))
    engine = load(checkpoint("llama"), kv_cache_fraction=0.25, speculation=drafts)
    draft = engine._speculator._drafter
    assert isinstance(draft, DraftModel)
    runner = draft._runner
    weights = sum(one.nbytes for one in load_file(checkpoint("qwen3") / "model.safetensors").values())
    both = engine._runner._kv_pool.nbytes + runner._kv_pool.nbytes
    block = both // engine._cache.num_blocks
    assert block == 4 * 2 * 768 + 4 * 768, "qwen3's heads are twice as wide as llama's"
    assert 0.25 * (free - weights) - block < both <= 0.25 * (free - weights)
    request = ask(PROMPTS[0], COUNT)
    assert len(run(engine, [request])[request.key].tokens) == COUNT


@pytest.mark.parametrize("capacity", [{}, {"kv_cache_bytes": 5 << 20}, {"kv_cache_fraction": 0.9}])
def test_what_is_reserved_is_what_a_draft_model_and_the_caches_take(capacity: dict[str, Any]) -> None:
    """Weights that are decoded once must leave it. Of a share nobody knows how much it will be: a quarter is."""
    free = 32 << 20
    drafts = SpeculationSettings(method="draft_target", draft_model=checkpoint("qwen3"))
    weights = sum(one.nbytes for one in load_file(checkpoint("qwen3") / "model.safetensors").values())
    directory = checkpoint("llama")
    loaded = load_model(outline_model(directory, load_config(directory), torch.float32, CPU, 512, "auto"), CPU)
    config = EngineConfig(checkpoint("llama"), dtype="float32", block_size=4, num_blocks=100, **capacity)
    alone, both = (memory.reserved_bytes(one, loaded, free) for one in (config, replace(config, speculation=drafts)))
    if "kv_cache_fraction" in capacity:
        assert (alone, both) == (free // 4, weights + (free - weights) // 4)
        assert memory.reserved_bytes(replace(config, speculation=drafts), loaded, weights - 1) == weights
    else:
        num_blocks = (5 << 20) // 3072 if capacity else 100
        assert (alone, both) == (num_blocks * 3072, weights + num_blocks * (3072 + 2 * 3072))


def test_weights_that_do_not_fit_stop_the_start(tmp_path: Path) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 20, "hidden_size": 1 << 20}))
    shutil.copy(checkpoint("llama") / "model.safetensors", tmp_path)
    line = "checkpoint: weights of [0-9]{14} bytes cannot be held: .*"
    with pytest.raises(DeploymentError, match=f"^{line}$"):
        load(tmp_path)
    drafts = SpeculationSettings(method="draft_target", draft_model=tmp_path)
    with pytest.raises(DeploymentError, match=f"^speculation.draft_model: {line}$"):
        load(checkpoint("llama"), speculation=drafts)
    with pytest.raises(DeploymentError, match=r"kv_cache.memory_fraction gives 0 bytes"):
        load(checkpoint("llama"), speculation=drafts, kv_cache_fraction=0.5)


def test_a_size_that_cannot_be_stops_the_start() -> None:
    with pytest.raises(DeploymentError, match="kv_cache.bytes gives 5000 bytes; a block of 4 tokens takes 3072"):
        load(checkpoint("llama"), kv_cache_bytes=5000)
    with pytest.raises(DeploymentError, match="kv_cache: no memory for 4611686018427387 blocks of 3072 bytes: "):
        load(checkpoint("llama"), num_blocks=4611686018427387)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_cache": {"tokens": 9, "bytes": 9}}, "`tokens` and `bytes` both say how much it holds; give one"),
        ({"kv_cache": {"memory_fraction": 1.5}}, "`kv_cache.memory_fraction` is 1.5"),
        ({"kv_cache": {"eviction": "fifo"}}, "`kv_cache.eviction` is 'fifo'"),
        ({"kv_cache": {"eviction": "lfu", "prefix_reuse": False}}, "`eviction` needs `prefix_reuse: true`"),
        ({"kv_cache": {"offload": {"bytes": 5}}}, "`bytes` needs `to:` host or file"),
        ({"kv_cache": {"offload": {"to": "host", "directory": "x"}}}, "`directory` needs `to:` file"),
        (
            {"kv_cache": {"offload": {"to": "host"}}, "engine": {"kind": "replay"}},
            "`kv_cache.offload` needs",
        ),
        (
            {"kv_cache": {"dtype": "int8"}, "engine": {"kind": "trtllm"}},
            "`kv_cache.dtype: int8` needs",
        ),
        ({"kv_cache": {"offload": {"to": "disk"}}}, "`kv_cache.offload.to` is 'disk'"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError) as error:
        validate({"model": "x", **settings}, "deployment.yaml")
    assert said in str(error.value)


def test_the_engine_gets_what_the_deployment_says() -> None:
    offload = {"to": "file", "bytes": 5000, "directory": "cold", "min_tokens": 7}
    data = {"model": "x", "kv_cache": {"bytes": 9000, "dtype": "int8", "eviction": "prefix", "offload": offload}}
    config = EngineConfig.of(validate(data, ""))
    assert (config.kv_cache_bytes, config.kv_cache_dtype, config.eviction) == (9000, "int8", "prefix")
    assert (config.offload_to, config.offload_bytes, config.offload_min_tokens) == ("file", 5000, 7)
    assert config.offload_directory == Path("cold")
