"""Trees of guesses: what is on the accepted path is kept and put into place, whatever lies beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inflight.engine.kvcache.blocks import BlockTable
from tests.engine.support.checkpoints import PROMPTS, checkpoint, greedy
from tests.engine.support.driving import ask, load, run
from tests.engine.support.speculating import foretold, shown, speculating

COUNT = 12


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_path_that_was_not_the_first_guess(name: str) -> None:
    """The right guess comes last: its keys and values lie behind those of the others."""
    requests = [ask(prompt, 20) for prompt in PROMPTS[:6]]
    engine = foretold(requests, tree=True, name=name)
    outputs = run(engine, requests)
    for request in requests:
        metrics = outputs[request.key].metrics
        assert outputs[request.key].tokens == greedy(name, tuple(request.prompt), 20)
        assert metrics is not None
        assert metrics.accepted_draft_tokens == 19 - (metrics.steps - metrics.prefill_steps) > 10
    engine._speculator._drafter = None
    again = [ask([*request.prompt, *outputs[request.key].tokens, 3], 6) for request in requests]
    reused = run(engine, again)
    for request in again:
        assert reused[request.key].tokens == greedy(name, tuple(request.prompt), 6)
    assert any(output.metrics.cached_tokens > 40 for output in reused.values() if output.metrics)


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8", "bfloat16"])
def test_moved_keys_and_values_are_what_they_were(kind: Any) -> None:
    """Of every kind of cache, its scales included; what is overlapped is read before it is written."""
    engine = load(checkpoint("llama"), kv_cache_dtype=kind)
    kv, slots = engine._runner._kv_pool, torch.arange(12)
    for layer in range(3):
        torch.manual_seed(layer)
        kv.write(layer, slots, torch.randn(12, 2, 16), torch.randn(12, 2, 16))
    before = [kv.read(layer, slots) for layer in range(3)]
    engine._runner.move(BlockTable([0, 1, 2], 0, 0), [(5, 4), (7, 5), (11, 6)])
    for layer, old in enumerate(before):
        for was, now in zip(old, kv.read(layer, slots), strict=True):
            assert torch.equal(now, was[:, [0, 1, 2, 3, 5, 7, 11, 7, 8, 9, 10, 11]])


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("method", ["ngram", "draft_target"])
def test_greedy_in_a_mixed_batch_with_reuse_chunks_and_preemption(method: str, policy: str) -> None:
    engine = speculating("llama", method, policy=policy, num_blocks=64, max_tokens_per_step=40, candidates=3)
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in PROMPTS]
        outputs = run(engine, requests)
        for request in requests:
            assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), COUNT)
    assert engine.stats.draft_tokens > engine.stats.accepted_draft_tokens > 0


def test_a_second_guess_is_right_more_often_than_the_first_alone() -> None:
    accepted = []
    for candidates in (1, 4):
        engine = speculating(noise=0.1, candidates=candidates, max_draft_tokens=3)
        run(engine, [ask(prompt, 24) for prompt in PROMPTS[:10]])
        accepted.append(engine.stats.steps)
    assert accepted[1] < accepted[0]


def test_sampled_tokens_are_those_without_speculation() -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "log_probs": True}
    requests = [ask(PROMPTS[1], 16, seed=seed, **options) for seed in range(6)]
    outputs = run(speculating(noise=0.05, candidates=3), requests)
    for seed, request in enumerate(requests):
        alone = run(load(checkpoint("llama")), [ask(PROMPTS[1], 16, seed=seed, **options)]).popitem()[1]
        assert shown(outputs[request.key]) == shown(alone)
        torch.testing.assert_close(
            torch.tensor(outputs[request.key].log_probs), torch.tensor(alone.log_probs), atol=1e-3, rtol=1e-3
        )
