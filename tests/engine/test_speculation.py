"""Speculation changes no token: token by token what there is without it, whatever is drafted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from inflight.engine.chunk import Chunk
from inflight.engine.request import Output
from inflight.engine.sampler import PendingSample, Sampled
from inflight.engine.speculate.draft_model import DraftModel
from tests.engine.support.checkpoints import PROMPTS, VOCAB, checkpoint, greedy, reference
from tests.engine.support.driving import ask, load, run
from tests.engine.support.speculating import shown, speculating

PROMPT = PROMPTS[0]
COUNT = 12


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize("policy", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "ngram"), ("llama", "draft_target"), ("gemma3", "draft_target"), ("mistral", "ngram")],
)
def test_greedy_in_a_mixed_batch_with_reuse_chunks_and_preemption(name: str, method: str, policy: str) -> None:
    engine = speculating(name, method, policy=policy, num_blocks=64, max_tokens_per_step=24)
    preemptions = 0
    for _ in range(2):
        requests = [ask(prompt, COUNT) for prompt in PROMPTS]
        outputs = run(engine, requests)
        for request in requests:
            assert outputs[request.key].tokens == greedy(name, tuple(request.prompt), COUNT)
        metrics = [output.metrics for output in outputs.values() if output.metrics]
        preemptions += sum(one.preemptions for one in metrics)
        assert any(one.cached_tokens for one in metrics)
    assert (preemptions > 0) == (policy == "max_utilization")
    assert engine.stats.draft_tokens > engine.stats.accepted_draft_tokens
    if method == "draft_target":
        assert engine.stats.accepted_draft_tokens > 0.2 * engine.stats.draft_tokens
        assert engine._speculator is not None
        assert engine._speculator._drafter is not None, "it was turned off"


@pytest.mark.parametrize(("blocks", "size", "drafts"), [(12, 4, 3), (12, 2, 4), (14, 2, 3)])
def test_drafts_that_a_full_cache_cuts_do_not_end_drafting(blocks: int, size: int, drafts: int) -> None:
    """A twin has computed them; the target's next token is the first that was cut, and nothing would be left to it."""
    cache = {"policy": "max_utilization", "num_blocks": blocks, "block_size": size, "prefix_reuse": False}
    engine = speculating(noise=0.0, max_draft_tokens=drafts, **cache)
    requests = [ask(prompt[:6], 14) for prompt in PROMPTS[:3]]
    outputs = run(engine, requests)
    for request in requests:
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 14)
    assert engine._speculator is not None
    assert engine._speculator._drafter is not None, "it was turned off"


@pytest.mark.proof
def test_the_model_drafting_for_itself_is_always_right() -> None:
    engine = speculating(noise=0.0, max_draft_tokens=5)
    requests = [ask(prompt, 25) for prompt in PROMPTS[:8]]
    outputs = run(engine, requests)
    for request in requests:
        metrics = outputs[request.key].metrics
        assert outputs[request.key].tokens == greedy("llama", tuple(request.prompt), 25)
        assert metrics is not None
        assert metrics.accepted_draft_tokens == metrics.draft_tokens == 20, "25 are one, and four times five and one"
        assert metrics.steps - metrics.prefill_steps == 4


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3},
    {"temperature": 0.6, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"repetition_penalty": 1.2, "bad_sequences": ((7,), (21, 33))},
    {"min_tokens": 9, "end_ids": frozenset(range(0, VOCAB, 3))},
    {"temperature": 0.5, "log_probs": True, "top_log_probs": 3, "generation_logits": True, "context_logits": True},
]


def test_sampled_tokens_and_their_scores_are_those_without_speculation() -> None:
    """Each with a seed; all that depends on a request's own tokens is right at each drafted position."""
    requests = [ask(PROMPTS[1], 16, seed=seed, **options) for seed, options in enumerate(SAMPLED)]
    engine = speculating(noise=0.05)
    outputs = run(engine, requests)
    assert engine.stats.accepted_draft_tokens > 10
    for seed, options in enumerate(SAMPLED):
        alone = run(load(checkpoint("llama")), [ask(PROMPTS[1], 16, seed=seed, **options)]).popitem()[1]
        output = outputs[requests[seed].key]
        assert shown(output) == shown(alone), str(options)
        torch.testing.assert_close(_scores(output), _scores(alone), atol=1e-3, rtol=1e-3)


def test_a_draft_follows_what_the_request_asks_for() -> None:
    """The twin draws by the sequence's own numbers, with its penalties: the same model is always right here too."""
    engine = speculating(noise=0.0)
    run(engine, [ask(PROMPTS[1], 16, seed=seed, **options) for seed, options in enumerate(SAMPLED)])
    assert engine.stats.accepted_draft_tokens > 0.95 * engine.stats.draft_tokens


@pytest.mark.proof
def test_sampled_tokens_are_distributed_as_the_models() -> None:
    """The second and third token of many seeds against the exact chances; a total variation that chance allows."""
    draws, options = 1500, {"temperature": 1.0, "top_k": 3}
    engine = speculating(noise=0.08, max_draft_tokens=3, num_blocks=4096, max_batch_size=256, max_tokens_per_step=2048)
    outputs = run(engine, [ask(PROMPT, 4, seed=seed, **options) for seed in range(draws)])
    assert 0.1 < engine.stats.accepted_draft_tokens / engine.stats.draft_tokens < 0.9
    counts = Counter(tuple(output.tokens[:3]) for output in outputs.values())
    expected = {(): 1.0}
    for _ in range(3):
        with torch.inference_mode():
            logits = reference("llama")(torch.tensor([[*PROMPT, *tokens] for tokens in expected])).logits[:, -1]
        top = logits.topk(3)
        expected = {
            (*tokens, int(token)): chance * float(share)
            for (tokens, chance), ids, shares in zip(expected.items(), top.indices, top.values.softmax(-1), strict=True)
            for token, share in zip(ids, shares, strict=True)
        }
    distance = sum(abs(counts[tokens] / draws - chance) for tokens, chance in expected.items()) / 2
    assert not counts.keys() - expected.keys()
    assert distance < (len(expected) / draws) ** 0.5 / 2


def _scores(output: Output) -> list[torch.Tensor]:
    top = [value for row in output.top_log_probs or () for _, value in row]
    rows = [*(output.generation_logits or ()), *(() if output.context_logits is None else output.context_logits)]
    logits = [torch.tensor(row) for row in rows]
    return [torch.tensor(output.log_probs or ()), torch.tensor(top), *logits]


@pytest.mark.parametrize(("more", "together"), [({}, True), ({"repetition_penalty": 1.0001}, False)])
def test_drafting_waits_once_unless_tokens_depend_on_tokens(
    more: dict[str, Any], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, order = speculating(max_draft_tokens=4), list[str]()
    drafter = engine._speculator._drafter
    assert isinstance(drafter, DraftModel)
    passes, wait = drafter._runner.run, PendingSample.wait

    def computed(chunks: list[Chunk], *rest: Any) -> Any:
        order.append("draft")
        return passes(chunks, *rest)

    def waited(choice: PendingSample) -> list[Sampled]:
        order.append("wait")
        return wait(choice)

    monkeypatch.setattr(drafter._runner, "run", computed)
    monkeypatch.setattr(PendingSample, "wait", waited)
    request = ask(PROMPTS[0][:6], 12, **more)
    output = run(engine, [request])[request.key]
    assert output.tokens == greedy("llama", tuple(PROMPTS[0][:6]), 12)
    four = ["draft"] * 4 + ["wait"] * 4 if together else ["draft", "wait"] * 4
    assert order[1:9] == four, "after the wait for the prompt's step"


def test_what_is_no_number_ends_a_draft_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(max_draft_tokens=4)
    drafter = engine._speculator._drafter
    assert isinstance(drafter, DraftModel)
    passes, requests, lengths = drafter._runner.run, [ask(prompt[:9], 12) for prompt in PROMPTS[:2]], list[list[int]]()
    draft = drafter.draft

    @torch.inference_mode()
    def spoilt(chunks: list[Chunk], *rest: Any) -> Any:
        logits, context = passes(chunks, *rest)
        for row, chunk in enumerate(chunks):
            if chunk.awaits and chunk.sequence.request.prompt == requests[0].prompt:
                logits[row] = torch.nan
        return logits, context

    def noted(wanted: Any) -> Any:
        drafts = draft(wanted)
        lengths.append([len(guesses[0]) for guesses in drafts.values()])
        return drafts

    monkeypatch.setattr(drafter._runner, "run", spoilt)
    monkeypatch.setattr(drafter, "draft", noted)
    outputs = run(engine, requests)
    assert [outputs[one.key].tokens for one in requests] == [greedy("llama", tuple(one.prompt), 12) for one in requests]
    assert lengths[0] == [1, 4]
