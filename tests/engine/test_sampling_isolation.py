"""What one request asks of the sampler cannot reach its neighbours, and what happens to a request cannot reach it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Output, Request
from inflight.engine.sampler import uniform
from inflight.engine.sequence import Sequence
from inflight.errors import EngineFailure, InvalidRequest
from inflight.sampling import SamplingParams
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, finish, load, run
from tests.engine.support.sequences import sample

PROMPT = list(range(1, 20))
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95}
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -6.0])


def _sequence(seed: int = 0, prompt: tuple[int, ...] = (0,), **more: Any) -> Sequence:
    return Sequence(Request(list(prompt), SamplingParams(max_tokens=10, **more)), 0, seed, 100, None)


def _alone(seed: int, **more: Any) -> list[int]:
    return run(load(checkpoint("llama")), [ask(PROMPT, 10, seed=seed, **SAMPLED, **more)]).popitem()[1].tokens


def _nan_for(engine: Engine, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine._runner.run

    def broken(chunks: Any, copies: Any) -> Any:
        logits, context = real(chunks, copies)
        logits = logits.clone()
        logits[row] = torch.nan
        return logits, context

    monkeypatch.setattr(engine._runner, "run", broken)


@pytest.mark.parametrize("budget", [1, 3, 7, 512])
def test_a_seeded_request_does_not_depend_on_its_chunks(budget: int) -> None:
    engine = load(checkpoint("llama"), max_tokens_per_step=budget)
    assert run(engine, [ask(PROMPT, 10, seed=4, **SAMPLED)]).popitem()[1].tokens == _alone(4)


@pytest.mark.parametrize("reuse", [True, False])
def test_a_seeded_request_goes_on_as_it_would_have_after_a_preemption(reuse: bool) -> None:
    """The seeded requests themselves are preempted: they have the lowest rank."""
    engine = load(checkpoint("llama"), num_blocks=16, policy="max_utilization", prefix_reuse=reuse)
    mine = [ask(PROMPT, 10, seed=seed, priority=-1, **SAMPLED) for seed in range(3)]
    for request in mine:
        engine.submit(request)
    for _ in range(3):
        engine.step()  # what comes out here is in the metrics; the tokens are read from the sequences
    sequences = [engine._sequences[request.key] for request in mine]
    rest = run(engine, [ask(range(30 + 7 * turn, 45 + 7 * turn), 12, priority=1) for turn in range(4)])
    for seed, (request, sequence) in enumerate(zip(mine, sequences, strict=True)):
        assert sequence.tokens[len(PROMPT) :] == _alone(seed), f"seed {seed}"
        assert rest[request.key].finish_reason is FinishReason.LENGTH
    assert sum(sequence.metrics.preemptions for sequence in sequences) > 0
    assert any(sequence.metrics.preemptions and sequence.generated for sequence in sequences)


def test_a_request_without_a_seed_gets_one_of_its_own() -> None:
    outputs = run(load(checkpoint("llama")), [ask(PROMPT, 10, temperature=1.5) for _ in range(6)])
    assert len({tuple(output.tokens) for output in outputs.values()}) == 6


def test_uniform_stays_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest 64-bit number, divided by 2**64, rounds to 1: beyond every token's share."""

    class Most:
        def digest(self) -> bytes:
            return b"\xff" * 8

    monkeypatch.setattr("inflight.engine.sampler.hashlib.blake2b", lambda *_, **__: Most())
    assert uniform(0, 0) < 1.0
    assert sample(LOGITS[None], [_sequence(temperature=1.0, top_k=3)])[0].token == 2


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("top_k", [0, 3])
def test_large_vocabularies_are_drawn_rightly(top_k: int) -> None:
    """Against the exact distribution, with a bias and a banned token; total variation below what chance allows."""
    torch.manual_seed(1)
    logits, draws = torch.randn(50) * 2, 8000
    options: dict[str, Any] = {"temperature": 0.8, "top_k": top_k, "logit_bias": {3: 2.5}, "bad_sequences": ((7,),)}
    rows = sample(logits.repeat(draws, 1), [_sequence(seed, **options) for seed in range(draws)])
    expected = logits.clone()
    expected[3] += 2.5
    expected[7] = -torch.inf
    if top_k:
        expected[expected < expected.topk(top_k).values[-1]] = -torch.inf
    shares = (expected / 0.8).softmax(-1)
    counts = Counter(row.token for row in rows)
    distance = sum(abs(counts[token] / draws - float(share)) for token, share in enumerate(shares)) / 2
    assert distance < math.sqrt(len(logits) / draws) / 2
    assert not any(counts[token] for token, share in enumerate(shares) if share == 0)


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_an_infinite_bias_decides(temperature: float | None) -> None:
    for seed in range(20):
        sampled = sample(LOGITS[None], [_sequence(seed, temperature=temperature, logit_bias={5: math.inf})])
        assert sampled[0].token == 5
    sampled = sample(LOGITS[None], [_sequence(temperature=temperature, logit_bias={0: -math.inf, 1: -math.inf})])
    assert sampled[0].token not in (0, 1)


def test_where_several_tokens_are_infinitely_likely_one_of_them_is_drawn() -> None:
    bias = {5: math.inf, 6: math.inf}
    tokens = {sample(LOGITS[None], [_sequence(s, temperature=1.0, logit_bias=bias)])[0].token for s in range(40)}
    assert tokens == {5, 6}


@pytest.mark.parametrize("temperature", [None, 1e-30, 1e30])
def test_extremes_give_a_token_of_the_vocabulary(temperature: float | None) -> None:
    for more in ({}, {"repetition_penalty": 1e-38}, {"presence_penalty": 3e38}):
        [row] = sample(LOGITS[None], [_sequence(prompt=(0, 1, 7), temperature=temperature, **more)])
        assert 0 <= row.token < len(LOGITS)


@pytest.mark.parametrize("end", [-1, -VOCAB - 5, VOCAB, 2**31 - 1])
def test_end_ids_that_the_model_lacks_forbid_nothing(end: int) -> None:
    """-1 is upstream's "none"; it must not stand for the last token, and none of them may fail the step."""
    last = torch.zeros(8)
    last[-1] = 5.0
    assert sample(last[None], [_sequence(end_ids=frozenset({end}), min_tokens=2)])[0].token == 7
    engine = load(checkpoint("llama"))
    odd, plain = ask(PROMPT, 4, end_ids=frozenset({end}), min_tokens=3), ask(PROMPT, 4)
    outputs = run(engine, [odd, plain])
    assert outputs[odd.key].tokens == outputs[plain.key].tokens


@pytest.mark.parametrize("options", [{}, SAMPLED, {"top_log_probs": 3, "log_probs": True}], ids=str)
def test_logits_that_are_not_numbers_end_their_request_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(checkpoint("llama"))
    good, broken = ask(PROMPT, 6, seed=1, **SAMPLED), ask([3, 4], 6, **options)
    engine.submit(good)
    engine.submit(broken)
    with monkeypatch.context() as patch:
        _nan_for(engine, 1, patch)
        first = {output.key: output for output in engine.step()}
    assert isinstance(first[broken.key].error, EngineFailure)
    assert not first[broken.key].tokens
    rest = finish(engine)
    assert broken.key not in rest
    assert first[good.key].tokens + rest[good.key].tokens == _alone(1)[:6]


_ALL = dict.fromkeys(range(VOCAB), -math.inf)


@pytest.mark.parametrize("options", [{}, SAMPLED, {"beam_width": 2}, {"top_log_probs": 3, "log_probs": True}], ids=str)
@pytest.mark.parametrize(
    "banned",
    [
        {"logit_bias": {**_ALL, 7: 0.0}, "bad_sequences": ((4, 7),)},
        {"logit_bias": {**_ALL, 7: 0.0}, "end_ids": frozenset({7}), "min_tokens": 2},
    ],
    ids=["bad words", "min_tokens"],
)
def test_a_request_that_bans_every_token_fails_alone(banned: dict[str, Any], options: dict[str, Any]) -> None:
    engine = load(checkpoint("llama"))
    good, impossible = ask(PROMPT, 6, seed=1, **SAMPLED), ask([3, 4], 6, **banned, **options)
    outputs = run(engine, [good, impossible])
    error = outputs[impossible.key].error
    assert isinstance(error, InvalidRequest)
    assert "embedding_bias, bad_words_list and min_tokens ban every token" in str(error)
    assert not outputs[impossible.key].tokens
    assert outputs[good.key].tokens == _alone(1)[:6]


@pytest.mark.parametrize("more", [{}, {"bad_sequences": ((7,),)}], ids=str)
def test_one_that_can_never_have_a_token_is_refused(more: dict[str, Any]) -> None:
    engine, bias = load(checkpoint("llama")), dict(_ALL)
    if more:
        del bias[7]
    with pytest.raises(InvalidRequest, match="ban every token"):
        engine.validate(ask([3, 4], 6, logit_bias=bias, **more))
    engine.validate(ask([3, 4], 6, logit_bias={**bias, 8: 0.0}, **more))


def test_bad_words_of_several_lengths_are_banned_where_they_would_be_completed() -> None:
    """Words that share their last tokens: each counts where all that comes before its last one is there."""
    bad = ((1,), (5, 0), (6, 5, 2), (9, 9, 9, 3))
    for prompt, banned in (((4,), {1}), ((5,), {0, 1}), ((6, 5), {0, 1, 2}), ((9, 9), {1}), ((9, 9, 9), {1, 3})):
        tokens = {sample(LOGITS[None], [_sequence(seed, prompt, temperature=9.0, bad_sequences=bad)])[0].token
                  for seed in range(300)}  # fmt: skip
        assert tokens == set(range(8)) - banned


def test_scores_of_a_batch_are_each_requests_own() -> None:
    """Rows with and without scores, penalties and sampling side by side: each as it would be alone."""
    kinds: list[dict[str, Any]] = [
        {},
        {"log_probs": True},
        {"top_log_probs": 2, "seed": 3, "temperature": 0.9},
        {"log_probs": True, "top_log_probs": 5, "repetition_penalty": 1.3},
        {"generation_logits": True, "logit_bias": {4: 3.0}},
    ]

    def shown(output: Output) -> tuple[Any, ...]:
        top = [[token for token, _ in row] for row in output.top_log_probs or ()]
        return output.tokens, top, output.log_probs is None, output.generation_logits is None

    requests = [ask(PROMPT, 5, **kind) for kind in kinds]
    together = run(load(checkpoint("llama")), requests)
    for request, kind in zip(requests, kinds, strict=True):
        alone = run(load(checkpoint("llama")), [ask(PROMPT, 5, **kind)]).popitem()[1]
        assert shown(together[request.key]) == shown(alone)
        torch.testing.assert_close(
            torch.tensor(together[request.key].log_probs or []), torch.tensor(alone.log_probs or []), atol=1e-4, rtol=0
        )


def test_reported_logits_do_not_keep_those_of_the_neighbours() -> None:
    """A view of its row would hold the whole step's logits in memory as long as the request's."""
    requests = [ask([index, index + 1], 2, generation_logits=True, context_logits=True) for index in range(4)]
    for output in run(load(checkpoint("llama")), requests).values():
        assert output.generation_logits is not None
        assert output.context_logits is not None
        assert all(row.flags.owndata for row in [*output.generation_logits, output.context_logits])


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to compute its first token from."""
    engine = load(checkpoint("llama"))
    with pytest.raises(InvalidRequest, match="input_ids is empty"):
        engine.validate(ask([], 3))
