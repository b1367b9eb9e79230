"""Models with recurrent layers: what transformers generates, however prompts are cut, reused, preempted or mixed."""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import Output, Request
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError, EngineFailure, UnsupportedFeature
from inflight.settings.deployment import validate
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import (
    LONG_PROMPT,
    LONG_PROMPTS,
    RECURRENT,
    checkpoint,
    greedy,
    likeliest,
    random_tokens,
    reference,
)
from tests.engine.support.driving import ask, assert_idle, finish, load, run

COUNT = 12
STATE_BYTES = 3 * 4 * (4 * 16 * 24 + 160 * 3)
"""Of a sequence of the checkpoints with four layers, in float32."""


each = pytest.mark.parametrize("name", sorted(RECURRENT))


def _check(name: str, requests: list[Request], outputs: dict[int, Output]) -> None:
    made = [(request.prompt, outputs[request.key].tokens) for request in requests]
    for (prompt, tokens), expected in zip(made, likeliest(name, made), strict=True):
        assert len(tokens) == COUNT
        assert tokens == expected, f"prompt of {len(prompt)} tokens"


def _cached(outputs: dict[int, Output]) -> list[int]:
    return [output.metrics.cached_tokens for output in outputs.values() if output.metrics]


@pytest.mark.proof
@pytest.mark.sweep(most=4)
@each
@pytest.mark.parametrize("policy", ["max_utilization", "guaranteed_no_evict"])
def test_in_a_mixed_batch_with_reuse_chunks_and_preemption(name: str, policy: str) -> None:
    """Twice: the second time most prefixes are cached."""
    engine = load(checkpoint(name), policy=policy, num_blocks=140, max_tokens_per_step=80, max_batch_size=16)
    preemptions = 0
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in LONG_PROMPTS]
        outputs = run(engine, requests)
        _check(name, requests, outputs)
        assert any(_cached(outputs))
        preemptions += sum(output.metrics.preemptions for output in outputs.values() if output.metrics)
    assert (preemptions > 0) == (policy == "max_utilization")


@pytest.mark.sweep
@each
def test_alone_as_transformers_generates_step_by_step(name: str) -> None:
    request = ask(LONG_PROMPTS[7], COUNT)
    assert run(load(checkpoint(name)), [request])[request.key].tokens == greedy(name, tuple(request.prompt), COUNT)


@pytest.mark.proof
@pytest.mark.sweep(most=2)
@each
def test_log_probs_are_those_of_transformers(name: str) -> None:
    """Within 1e-4, and where rounding alone moves transformers' own, within twice that more.

    With random weights a state may depend on the last bits so much that processors which round otherwise differ.
    """
    precise = copy.deepcopy(reference(name)).double()
    precise.set_experts_implementation("eager")  # the grouped product takes no float64
    engine = load(checkpoint(name), max_tokens_per_step=100)
    requests = [ask(prompt, COUNT, log_probs=True) for prompt in LONG_PROMPTS]
    outputs = run(engine, requests)
    for request in requests:
        made = outputs[request.key]
        chosen, moved = (_log_probs(model, request.prompt, made.tokens) for model in (reference(name), precise))
        allowed = 1e-4 + 2 * float((chosen - moved).abs().max())
        torch.testing.assert_close(torch.tensor(made.log_probs), chosen, atol=allowed, rtol=0)


def _log_probs(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return what a model of transformers gives each of ``tokens`` behind ``prompt``, in float32."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.proof
@pytest.mark.sweep(most=4)
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5moe", "qwen3next", "qwen2moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_neighbours_change_no_bit(name: str, dtype: str) -> None:
    """Whole prompts, as the same cuts are the same products; the logits are compared, all of them.

    ``qwen2moe`` has no recurrent layers, but the same gate of a shared expert.
    """
    settings: dict[str, Any] = {"dtype": dtype, "prefix_reuse": False, "max_tokens_per_step": 4096, "num_blocks": 1024}
    settings |= {"kv_cache_dtype": "float32"}  # read in place: a row's sums do not depend on the other rows

    def logits(engine: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
        requests = [ask(prompt, COUNT, generation_logits=True) for prompt in prompts]
        outputs = run(engine, requests)
        return [np.stack(outputs[request.key].generation_logits or []) for request in requests]

    engine = load(checkpoint(name), **settings)
    for alone, together in zip(
        [logits(engine, [one])[0] for one in LONG_PROMPTS], logits(engine, LONG_PROMPTS), strict=True
    ):
        assert np.array_equal(alone, together)


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("cut", [64, 65, 100, 127, 128, 129, 191, 192, 199])
def test_reuse_changes_no_token(cut: int) -> None:
    """A prompt, another one that departs from it, that one again, and a conversation that goes on."""
    prompts = [LONG_PROMPT, [*LONG_PROMPT[:cut], *random_tokens(70, cut)]]
    prompts += [prompts[1], [*prompts[1], *random_tokens(90, cut + 1)]]
    found = []
    for reuse in (True, False):
        engine = load(checkpoint("qwen3.5"), prefix_reuse=reuse, max_tokens_per_step=120)
        outputs = [run(engine, [request])[request.key] for request in (ask(prompt, COUNT) for prompt in prompts)]
        found.append([output.tokens for output in outputs])
        cached = [output.metrics.cached_tokens if output.metrics else 0 for output in outputs]
        last = (len(prompts[1]) - 1) // 64 * 64
        expected = [0, 192 if cut >= 192 else 0, last, last]
        assert cached == (expected if reuse else [0] * 4)
    assert found[0] == found[1]


@pytest.mark.proof
def test_a_conversation_computes_its_last_turn_alone() -> None:
    """Each turn's prompt has the answer before it; that is computed as a prompt, and found again from then on."""
    engine, prompt = load(checkpoint("qwen3.5")), LONG_PROMPT[:100]
    for turn in range(3):
        request = ask(prompt, 60, ignore_eos=True)
        output = run(engine, [request])[request.key]
        assert output.metrics is not None
        assert output.metrics.cached_tokens == [0, 64, 128][turn]
        prompt = [*prompt, *output.tokens, *random_tokens(20, turn)]


@pytest.mark.proof
@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_with_few_snapshots_tokens_are_the_same(snapshots: int) -> None:
    engine = load(checkpoint("qwen3.5moe"), state_snapshots=snapshots, max_tokens_per_step=100)
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in LONG_PROMPTS[8:]]
        outputs = run(engine, requests)
        _check("qwen3.5moe", requests, outputs)
    assert any(_cached(outputs)) == (snapshots > 0)


@pytest.mark.proof
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_keys_and_values_may_be_rounded(kv_cache_dtype: str) -> None:
    """Those of layers with attention; tokens are the same in any batch."""
    engine = load(checkpoint("qwen3.5"), kv_cache_dtype=kv_cache_dtype, max_tokens_per_step=100)
    requests = [ask(prompt, COUNT) for prompt in LONG_PROMPTS]
    together = run(engine, requests)
    alone = load(checkpoint("qwen3.5"), kv_cache_dtype=kv_cache_dtype, prefix_reuse=False)
    for request in requests:
        again = ask(request.prompt, COUNT)
        assert together[request.key].tokens == run(alone, [again])[again.key].tokens


@pytest.mark.proof
def test_cancellations_at_random_lose_no_state() -> None:
    chance = random.Random(6)
    engine = load(checkpoint("qwen3.5"), policy="max_utilization", num_blocks=120, max_tokens_per_step=100)
    states = engine._cache.states
    assert states is not None
    for _ in range(6):
        requests = [ask(chance.choice(LONG_PROMPTS), chance.randrange(1, COUNT)) for _ in range(20)]
        for request in requests:
            engine.submit(request)
        open_keys = [request.key for request in requests]
        while engine.busy:
            engine.step()
            engine._cache.check()
            assert states.num_running == len(engine._scheduler.running)
            if open_keys and chance.random() < 0.3:
                engine.cancel(open_keys.pop(chance.randrange(len(open_keys))))
        assert_idle(engine)
        assert states.num_running == 0
    request = ask(LONG_PROMPT, COUNT)
    _check("qwen3.5", [request], run(engine, [request]))


def test_a_step_that_fails_leaves_no_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots that it was to fill are forgotten."""
    engine = load(checkpoint("qwen3.5"))
    run(engine, [ask(LONG_PROMPT, 1)])
    victim = ask([*LONG_PROMPT, 4, 5], COUNT)
    engine.submit(victim)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner._state_pool, "copy", _raise)
        output = finish(engine)[victim.key]
    assert isinstance(output.error, EngineFailure)
    requests = [ask(LONG_PROMPT, COUNT), ask([*LONG_PROMPT, 4, 5], COUNT)]
    _check("qwen3.5", requests, run(engine, requests))


def _raise(*_: object) -> None:
    raise RuntimeError("a fault, made by the test")


def test_context_logits_come_chunk_by_chunk() -> None:
    request = ask(LONG_PROMPT, 2, context_logits=True)
    output = run(load(checkpoint("qwen3next"), max_tokens_per_step=96), [request])[request.key]
    with torch.inference_mode():
        expected = reference("qwen3next")(torch.tensor([LONG_PROMPT])).logits[0]
    torch.testing.assert_close(torch.tensor(output.context_logits), expected, atol=2e-3, rtol=1e-4)


def test_the_scorer_computes_the_same() -> None:
    with torch.inference_mode():
        expected = reference("qwen3.5")(torch.tensor([LONG_PROMPT])).logits[0]
    scorer = Scorer(checkpoint("qwen3.5"), "float32", device="cpu")
    torch.testing.assert_close(scorer.logits(LONG_PROMPT), expected, atol=2e-3, rtol=1e-4)
    keys, values = scorer.kv_ranges(LONG_PROMPT)
    assert [bool(one) for one in keys] == [bool(one) for one in values] == [False, False, False, True]


def test_what_predicts_several_tokens_is_left_out(tmp_path: Path) -> None:
    """Published checkpoints have it, under names that begin with ``mtp.``."""
    folder = Path(shutil.copytree(checkpoint("qwen3next"), tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.fc.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    request = ask(LONG_PROMPTS[2], COUNT)
    _check("qwen3next", [request], run(load(folder), [request]))


def test_memory_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    block = 2 * 2 * 32 * 4 * 4  # keys and values, heads, their size, tokens, bytes
    budget = 1 << 20
    engine = load(checkpoint("qwen3.5"), kv_cache_bytes=budget, max_batch_size=4)
    config = engine._config
    assert config.state_snapshots == 4
    assert config.num_blocks == (budget - 8 * STATE_BYTES) // block
    assert engine._runner._state_pool.nbytes == 8 * STATE_BYTES
    assert (
        f"recurrent state: 3 layers x {STATE_BYTES // 3} bytes = {STATE_BYTES} bytes per sequence, as much as keys and "
        f"values of {STATE_BYTES * 4 // block} tokens; 4 sequences at once and 4 snapshots: "
        f"{8 * STATE_BYTES / 2**20:.1f} MiB"
    ) in caplog.text
    engine = load(checkpoint("qwen3.5"), kv_cache_bytes=budget, max_batch_size=16)
    assert engine._config.state_snapshots == (budget - 16 * STATE_BYTES) // 4 // STATE_BYTES == 6
    assert load(checkpoint("qwen3.5"), prefix_reuse=False)._config.state_snapshots == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_step": 94}, "batching.max_tokens_per_step is 94; .* it must be at least 95"),
        ({"prefill_chunk_tokens": 32}, "batching.prefill_chunk_tokens is 32; .* by 64 tokens: it must be no less"),
        ({"state_snapshot_tokens": 96}, "kv_cache.state_snapshot_tokens is 96; .* must be a multiple of 64"),
        ({"offload_to": "host"}, "kv_cache.offload.to is host; .* it must be none"),
        ({"speculation": SpeculationSettings(method="ngram")}, "speculation.method is ngram; .* leave it out"),
        ({"kv_cache_bytes": 1 << 17}, "kv_cache.bytes gives 131072 bytes; .*, 32 states of sequences and 0 snapshots"),
    ],
)
def test_what_cannot_be_had_stops_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError, match=message):
        load(checkpoint("qwen3.5"), **settings)


def test_what_only_recurrent_layers_have_is_refused_elsewhere() -> None:
    with pytest.raises(DeploymentError, match="kv_cache.state_snapshots is 3; LlamaForCausalLM has no recurrent"):
        load(checkpoint("llama"), state_snapshots=3)
    with pytest.raises(DeploymentError, match="`state_snapshots` needs `prefix_reuse: true`"):
        validate({"model": "x", "kv_cache": {"prefix_reuse": False, "state_snapshots": 3}}, Path("."))


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    drafts = SpeculationSettings(method="draft_target", draft_model=checkpoint("qwen3.5"))
    with pytest.raises(DeploymentError, match="speculation.draft_model: .* has recurrent layers"):
        load(checkpoint("llama"), speculation=drafts)


def test_beam_search_is_refused() -> None:
    engine = load(checkpoint("qwen3.5"))
    with pytest.raises(UnsupportedFeature, match="beam_width above 1 is not supported for a model with recurrent"):
        engine.validate(ask(LONG_PROMPT, 4, beam_width=2))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("linear_num_value_heads", 3, "linear_num_key_heads is 2, linear_num_value_heads 3"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim 1"),
        ("linear_key_head_dim", 0, "linear_key_head_dim is 0; it must be a positive integer"),
        ("layer_types", ["linear_attention"] * 4, "no layer has attention"),
        ("layer_types", ["sliding_attention"] * 4, "layer_types is .* each of"),
        ("attn_output_gate", False, "attn_output_gate is False; it is not supported"),
        ("mamba_ssm_dtype", "bfloat16", "mamba_ssm_dtype is bfloat16; it is not supported"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(tmp_path: Path, field: str, value: Any, message: str) -> None:
    data = json.loads((checkpoint("qwen3.5") / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(DeploymentError, match=message):
        Engine.load(EngineConfig(tmp_path, device="cpu"))
