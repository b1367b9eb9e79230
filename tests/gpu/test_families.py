"""Every family of models on a GPU: in float32 transformers' tokens, in bfloat16 close to them.

What has a part that the kernels lack is computed by plain PyTorch there; in a dry run, on a CPU, everything is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.engine.engine import Engine
from inflight.engine.models.limits import unknown_to_gpu_kernels
from inflight.engine.request import Output, Request
from tests.engine.support.adapted import judge
from tests.engine.support.checkpoints import (
    ARCHITECTURES,
    LONG_PROMPTS,
    PROMPTS,
    RECURRENT,
    TOKENS,
    checkpoint,
    greedy,
    likeliest,
    reference,
)
from tests.engine.support.driving import ask, load, run
from tests.engine.support.mxfp4 import packed_gpt_oss
from tests.engine.support.packed_models import FORMATS, published
from tests.gpu.support.device import DEVICE, DRY

pytestmark = [pytest.mark.dry, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
COUNT = 12
each = pytest.mark.parametrize("name", ARCHITECTURES)
_LATENT = {"num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
_ADAPTED = ["gpt2", "cohere2", "granitemoe", "deepseek_v2"]
"""Learned positions and other linears, windows, experts, and other sizes of keys than of values."""


def _load(directory: Path, **settings: Any) -> Engine:
    """Return an engine on the device, with graphs."""
    where = {"cpu_step": "pytorch"} if DRY else {}
    engine = load(directory, device=DEVICE.type, **where | settings)
    if not DRY:
        engine._runner.warm_up()
    return engine


def _mixed(name: str, **settings: Any) -> tuple[Engine, list[list[int]]]:
    """Return an engine of 32 sequences with too few blocks for them, and what to ask it."""
    long = name in RECURRENT
    sizes = (140, 80, 16, LONG_PROMPTS) if long else (64, 24, 32, PROMPTS)
    blocks, tokens, batch, prompts = sizes
    sized = {"num_blocks": blocks, "max_tokens_per_step": tokens, "max_batch_size": batch}
    return _load(checkpoint(name), policy="max_utilization", **sized | settings), prompts


def _check(name: str, requests: list[Request], outputs: dict[int, Output]) -> None:
    made = [(request.prompt, outputs[request.key].tokens) for request in requests]
    for (prompt, tokens), expected in zip(made, likeliest(name, made), strict=True):
        assert len(tokens) == COUNT
        assert tokens == expected, f"prompt of {len(prompt)} tokens"


@each
def test_alone_and_in_a_mixed_batch_with_reuse_chunks_and_preemption(name: str) -> None:
    engine, prompts = _mixed(name)
    if not DRY:
        known = not unknown_to_gpu_kernels(engine._runner._model.config)
        assert (engine._runner._kernels is not None) == known
    request = ask(PROMPTS[0], COUNT)
    outputs = run(engine, [request])
    assert outputs[request.key].tokens == greedy(name, tuple(request.prompt), COUNT)
    requests = [ask(prompt, COUNT) for prompt in prompts]
    outputs = run(engine, requests)
    _check(name, requests, outputs)
    metrics = [output.metrics for output in outputs.values() if output.metrics]
    assert any(one.preemptions for one in metrics), "nothing was preempted"
    assert any(one.cached_tokens for one in metrics), "nothing was reused"


@each
def test_in_bfloat16(name: str) -> None:
    """Nearly all tokens are among the reference's first few; rounding may choose other experts, and other tokens."""
    engine, prompts = _mixed(name, dtype="bfloat16")
    requests = [ask(prompt, COUNT, ignore_eos=True) for prompt in prompts[:16]]
    outputs = run(engine, requests)
    ranks = [
        _ranks(_logits(name, request.prompt, outputs[request.key].tokens), outputs[request.key].tokens)
        for request in requests
    ]
    assert float((torch.cat(ranks) < 5).float().mean()) > 0.9
    assert all(len(output.tokens) == COUNT for output in outputs.values())


def _logits(name: str, prompt: list[int], tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(name)(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits


def _ranks(logits: Tensor, tokens: list[int]) -> Tensor:
    """Return of each token how many are likelier."""
    return (logits > logits.gather(-1, torch.tensor(tokens)[:, None])).sum(-1)


@pytest.mark.parametrize("name", ["llama", "gemma4, shared", "deepseek3"])
def test_blocks_come_back_from_the_host(name: str) -> None:
    """In one tensor, in several of other shapes, and in one that has keys and values."""
    engine, prompts = _mixed(name, offload_to="host", offload_bytes=2 << 20, offload_min_tokens=1)
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in prompts]
        _check(name, requests, run(engine, requests))
    assert engine._cache.counts.restored_tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kind", "special"),
    [
        *((name, "Llama", {}) for name in FORMATS),
        ("fp8 by blocks", "DeepseekV3", _LATENT),
    ],
)
def test_packed_formats(name: str, kind: str, special: dict[str, Any], dtype: str) -> None:
    """Logits of tokens are close to the largest; of nearly all, where inputs are rounded, which magnifies."""
    model = published(name, kind, **special)
    engine = _load(model.directory, dtype=dtype, max_batch_size=4, max_tokens_per_step=24)
    requests = [ask(TOKENS[start : start + 20], COUNT, ignore_eos=True) for start in (0, 31, 60)]
    outputs = run(engine, requests)
    behind = []
    for request in requests:
        tokens = outputs[request.key].tokens
        logits = model.logits([*request.prompt, *tokens])[len(request.prompt) - 1 : -1]
        behind.append(logits.amax(-1) - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0])
    rounded = dtype == "bfloat16" or FORMATS[name][2] is not None
    limit, share = (1.5, 0.9) if rounded else (0.02, 1.0)
    assert float((torch.cat(behind) < limit).float().mean()) >= share


@pytest.mark.parametrize("fits", [True, False])
def test_mxfp4_experts(fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded at the start, and, where there is no memory for that, in each step."""
    from inflight.engine.cuda import prepare

    if not fits:
        monkeypatch.setattr(prepare, "_RESERVE", 1 << 50)
    model = packed_gpt_oss(tmp_path / "model")
    requests = [ask(prompt, COUNT) for prompt in PROMPTS[:8]]
    engine = _load(tmp_path / "model", max_batch_size=8, max_tokens_per_step=24)
    outputs = run(engine, requests)
    for request in requests:
        prompt = torch.tensor([request.prompt])
        with torch.inference_mode():
            made = model.generate(prompt, max_new_tokens=COUNT, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert outputs[request.key].tokens == made[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("kind", _ADAPTED)
def test_models_that_transformers_computes(kind: str) -> None:
    assert judge(kind, device=DEVICE.type).served
