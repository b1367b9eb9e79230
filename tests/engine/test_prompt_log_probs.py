"""Log-probs of prompts: those of transformers, bit for bit those of the context logits, and whatever else goes on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from inflight.engine import prompt_outputs
from inflight.engine.engine import Engine
from inflight.engine.request import Output, PromptScores, Request
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import ARCHITECTURES, PROMPTS, RECURRENT, checkpoint, reference
from tests.engine.support.driving import ask, load, run

CLOSE = {"atol": 1e-4, "rtol": 1e-5}
TOP = 3
LONG = PROMPTS[-4]
each = pytest.mark.parametrize("name", ARCHITECTURES)


@functools.cache
def _expected(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return transformers' log-probs ``[n, vocab]`` of what follows each position."""
    with torch.inference_mode():
        return reference(name)(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


def _scores(output: Output, prompt: list[int], top: int = TOP) -> PromptScores:
    scores = output.prompt_scores
    assert scores is not None
    assert [one.dtype for one in scores] == [np.float32, np.int32, np.float32]
    assert [one.shape for one in scores] == [(len(prompt) - 1,), *[(len(prompt) - 1, top)] * 2]
    return scores


def _check(name: str, request: Request, output: Output) -> None:
    prompt = request.prompt
    scores, expected = _scores(output, prompt), _expected(name, tuple(prompt))[:-1]
    own = expected.gather(-1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.log_probs), own, **CLOSE)
    torch.testing.assert_close(torch.tensor(scores.top_log_probs), expected.topk(TOP, -1).values, **CLOSE)
    of_ids = expected.gather(-1, torch.tensor(scores.top_ids, dtype=torch.int64))
    torch.testing.assert_close(torch.tensor(scores.top_log_probs), of_ids, **CLOSE)


def _same(left: Output, right: Output) -> bool:
    assert left.prompt_scores is not None
    assert right.prompt_scores is not None
    return all(np.array_equal(one, other) for one, other in zip(left.prompt_scores, right.prompt_scores, strict=True))


def _one(engine: Engine, prompt: list[int], max_tokens: int = 1, **more: Any) -> Output:
    request = ask(prompt, max_tokens, **({"prompt_log_probs": TOP} | more))
    return run(engine, [request])[request.key]


@pytest.mark.sweep
@each
def test_they_are_those_of_transformers(name: str) -> None:
    sizes = {} if name in RECURRENT else {"max_tokens_per_step": 7}
    engine = load(checkpoint(name), **sizes)
    requests = [ask(prompt, 2, prompt_log_probs=TOP) for prompt in (PROMPTS[0], PROMPTS[11], LONG)]
    outputs = run(engine, requests)
    for request in requests:
        _check(name, request, outputs[request.key])


@pytest.mark.parametrize("cpu_step", ["auto", "pytorch"])
def test_they_are_the_log_softmax_of_the_context_logits_bit_for_bit(cpu_step: str) -> None:
    engine = load(checkpoint("llama"), cpu_step=cpu_step, max_tokens_per_step=100)
    prompt = [1 + index * 7 % 300 for index in range(280)]
    output = _one(engine, prompt, context_logits=True, log_probs=True, top_log_probs=1)
    scores = _scores(output, prompt)
    all_of_them = torch.as_tensor(output.context_logits).log_softmax(-1)
    own = all_of_them[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert np.array_equal(scores.log_probs, own.numpy())
    best = all_of_them[:-1].topk(TOP, -1)
    assert np.array_equal(scores.top_ids, best.indices.numpy())
    assert np.array_equal(scores.top_log_probs, best.values.numpy())
    assert output.top_log_probs is not None
    assert output.log_probs == [output.top_log_probs[0][0][1]] == [float(all_of_them[-1].max())]


def test_the_value_of_a_token_that_is_the_likeliest_is_the_likeliest_s() -> None:
    """A client tells by this equality of floats whether a text is what greedy decoding gives."""
    engine = load(checkpoint("llama"))
    made = _one(engine, LONG, 20, ignore_eos=True)
    output = _one(engine, [*LONG, *made.tokens], top_log_probs=1)
    assert output.prompt_scores is not None
    scores = PromptScores(*(one[len(LONG) - 1 :] for one in output.prompt_scores))
    assert scores.top_ids[:, 0].tolist() == made.tokens
    assert np.array_equal(scores.log_probs, scores.top_log_probs[:, 0])


@pytest.mark.parametrize("cpu_step", ["auto", "pytorch"])
def test_a_prompt_in_chunks_or_after_a_cached_prefix_has_the_same(cpu_step: str) -> None:
    whole = _one(load(checkpoint("llama"), cpu_step=cpu_step), LONG)
    engine = load(checkpoint("llama"), cpu_step=cpu_step, max_tokens_per_step=9)
    first, again = _one(engine, LONG), _one(engine, LONG, 3)
    assert _same(first, again)
    if cpu_step == "auto":
        assert _same(whole, first)
    _check("llama", ask(LONG), first)  # PyTorch rounds otherwise in products of other numbers of rows
    assert again.metrics is not None
    assert not again.metrics.cached_tokens
    plain = ask(LONG, 3)
    metrics = run(engine, [plain])[plain.key].metrics
    assert metrics is not None
    assert metrics.cached_tokens > 30, "the blocks that were computed for log-probs are cached"


def test_no_more_than_some_rows_of_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _one(load(checkpoint("llama")), LONG)
    monkeypatch.setattr(prompt_outputs, "CONTEXT_ROWS", 16)
    monkeypatch.setattr(prompt_outputs, "_SOFTMAX_ROWS", 5)
    engine, most = load(checkpoint("llama")), list[int]()
    native = engine._runner._native
    assert native is not None
    real = native.logits
    monkeypatch.setattr(native, "logits", lambda rows: most.append(len(rows)) or real(rows))
    assert _same(whole, _one(engine, LONG))
    assert len(most) == -(-len(LONG) // 16)
    assert max(most) == 16


def test_they_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    """What was computed before is forgotten, and computed again: once, and whole."""
    prompt = list(range(1, 61))
    alone = _one(load(checkpoint("llama")), prompt)
    engine = load(checkpoint("llama"), policy="max_utilization", num_blocks=24, max_tokens_per_step=8)
    for index in range(3):
        engine.submit(ask([100 + index], 30))
    engine.step()
    low = ask(prompt, 12, priority=-1, prompt_log_probs=TOP)
    output = run(engine, [low])[low.key]
    assert output.metrics is not None
    assert output.metrics.preemptions > 0
    assert _same(alone, output)


def test_a_preemption_behind_the_prompt_does_not_compute_it_again() -> None:
    """The log-probs are given out by then, and the prefix cache may be used."""
    engine = load(checkpoint("llama"), policy="max_utilization", num_blocks=40, max_tokens_per_step=64)
    requests = [
        ask(PROMPTS[12 + index], 24, priority=-index, prompt_log_probs=TOP, ignore_eos=True) for index in range(8)
    ]
    outputs = run(engine, requests)
    assert sum(one.metrics.preemptions for one in outputs.values() if one.metrics) > 0
    for request in requests:
        _check("llama", request, outputs[request.key])


def test_they_come_once_with_the_first_output_that_has_tokens() -> None:
    engine = load(checkpoint("llama"), max_tokens_per_step=9)
    engine.submit(ask(LONG, 5, prompt_log_probs=0, ignore_eos=True))
    outputs = list[Output]()
    while engine.busy:
        outputs += engine.step()
    assert [output.prompt_scores is not None for output in outputs] == [True, False, False, False, False]
    _scores(outputs[0], LONG, top=0)


def test_a_prompt_of_one_token_has_none() -> None:
    output = _one(load(checkpoint("llama")), [7])
    _scores(output, [7])


def test_with_speculation_they_are_the_same() -> None:
    prompt = [5, 6, 7, 8] * 6
    plain = _one(load(checkpoint("llama")), prompt, 12, ignore_eos=True, log_prob_ids=(3, 9))
    engine = load(checkpoint("llama"), speculation=SpeculationSettings(method="ngram"))
    fast = _one(engine, prompt, 12, ignore_eos=True, log_prob_ids=(3, 9))
    assert fast.tokens == plain.tokens
    assert _same(plain, fast)
    np.testing.assert_allclose(np.stack(fast.token_log_probs or []), np.stack(plain.token_log_probs or []), atol=1e-5)


def test_a_beam_search_has_those_of_its_prompt() -> None:
    engine = load(checkpoint("llama"), max_tokens_per_step=9)
    output = _one(engine, LONG, 4, beam_width=3)
    assert output.beams is not None
    assert _same(_one(load(checkpoint("llama")), LONG), output)


def test_log_probs_of_given_tokens_are_at_each_new_position() -> None:
    engine, ids = load(checkpoint("llama")), (3, 250, 3)
    asking = ask(LONG, 4, log_prob_ids=ids, log_probs=True, temperature=2.0, seed=1, logit_bias={3: 2.0})
    beside = [ask(PROMPTS[5], 4, log_prob_ids=(8,)), ask(PROMPTS[6], 4, ignore_eos=True)]
    outputs = run(engine, [asking, *beside])
    output = outputs[asking.key]
    table = np.stack(output.token_log_probs or [])
    assert table.shape == (len(output.tokens), 3)
    expected = _expected("llama", (*LONG, *output.tokens))[len(LONG) - 1 : -1]
    torch.testing.assert_close(torch.tensor(table), expected[:, list(ids)], **CLOSE)
    for token, own, row in zip(output.tokens, output.log_probs or (), table, strict=True):
        assert token not in ids or own == row[ids.index(token)]
    assert np.stack(outputs[beside[0].key].token_log_probs or []).shape[1] == 1
    assert outputs[beside[1].key].token_log_probs is None
