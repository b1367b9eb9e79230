"""Sampling: repeatable, independent of neighbours, and of the right distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.engine.sampler import uniform
from inflight.engine.sequence import Sequence
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, load, run
from tests.engine.support.sequences import LOGITS, make_sequence, sample


def _token(logits: torch.Tensor, sequence: Sequence) -> int:
    return sample(logits[None], [sequence])[0].token


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "warpers"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 1.0, "top_k": 3}, [TopKLogitsWarper(3)]),
        ({"temperature": 1.0, "top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"temperature": 1.0, "min_p": 0.3}, [MinPLogitsWarper(0.3)]),
        (
            {"temperature": 1.4, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
            [TemperatureLogitsWarper(1.4), TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else str(len(value)),
)
def test_the_distribution_is_that_of_transformers(options: dict[str, Any], warpers: list[Any]) -> None:
    """Chi-square over 6,000 seeds, at the 0.1 % level."""
    draws = 6000
    rows = sample(LOGITS.repeat(draws, 1), [make_sequence(seed, **options) for seed in range(draws)])
    counts = np.bincount([row.token for row in rows], minlength=len(LOGITS))
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.long), LOGITS[None].clone())
    expected = expected.softmax(-1)[0].numpy() * draws
    assert not counts[expected == 0].any(), "a token was drawn that is out of bounds"
    possible = expected > 0
    chi2 = float((((counts - expected) ** 2)[possible] / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    # Wilson-Hilferty's approximation of the chi-square quantile; 3.09 is the normal one at 0.1 %.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi2 < limit


def test_uniform_numbers_are_uniform_and_repeatable() -> None:
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(counts - 500).max() < 100
    assert uniform(2**64 - 1, 7) == uniform(2**64 - 1, 7) != uniform(2**64 - 1, 8)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95}
    mine = [ask(range(1, 20), 10, seed=seed, **options) for seed in range(5)]
    alone = [
        run(load(checkpoint("llama")), [ask(range(1, 20), 10, seed=s, **options)]).popitem()[1].tokens for s in range(5)
    ]
    others = [ask(range(2, 30), 12, seed=99, temperature=2.0) for _ in range(20)]
    engine = load(checkpoint("llama"), num_blocks=20, policy="max_utilization", max_tokens_per_step=16)
    outputs = run(engine, [*mine, *others])
    assert [outputs[request.key].tokens for request in mine] == alone
    assert any(output.metrics and output.metrics.preemptions for output in outputs.values())
    assert len({tuple(tokens) for tokens in alone}) == 5


def test_logit_bias_and_bad_words() -> None:
    assert _token(LOGITS, make_sequence(logit_bias={7: 20.0})) == 7
    assert _token(LOGITS, make_sequence(logit_bias={0: -5.0})) == 1
    assert _token(LOGITS, make_sequence(bad_sequences=((0,), (1,)))) == 2
    assert _token(LOGITS, make_sequence(prompt=(5,), bad_sequences=((5, 0),))) == 1
    assert _token(LOGITS, make_sequence(prompt=(4,), bad_sequences=((5, 0),))) == 0
    assert _token(LOGITS, make_sequence(prompt=(5,), bad_sequences=((4, 5, 0),))) == 0


def test_top_p_that_is_reached_exactly_keeps_no_further_token() -> None:
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0])  # a quarter each, and sums of quarters are exact
    rows = sample(logits.repeat(200, 1), [make_sequence(seed, temperature=1.0, top_p=0.5) for seed in range(200)])
    assert {row.token for row in rows} == {0, 1}


def test_min_tokens_forbids_end_ids() -> None:
    sequence = make_sequence(end_ids=frozenset({0, 99_999}), min_tokens=2)
    assert _token(LOGITS, sequence) == 1
    sequence.tokens += [3, 3]
    assert _token(LOGITS, sequence) == 0
    assert _token(LOGITS, make_sequence(end_ids=frozenset({0}), min_tokens=2, ignore_eos=True)) == 0


def test_repetition_penalty_is_that_of_transformers() -> None:
    ids = (0, 0, 5, 6)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), LOGITS[None].clone())[0]
    logits = LOGITS[None].clone()
    from inflight.engine.sampler import _adjust

    _adjust(logits[0], make_sequence(prompt=ids[:2], generated=ids[2:], repetition_penalty=1.7))
    torch.testing.assert_close(logits[0], expected)


def test_presence_and_frequency_count_prompt_and_output() -> None:
    from inflight.engine.sampler import _adjust

    logits = LOGITS.clone()
    _adjust(logits, make_sequence(prompt=(0, 0), generated=(1,), presence_penalty=0.5, frequency_penalty=0.25))
    torch.testing.assert_close(logits[:3], torch.tensor([2.0 - 0.5 - 0.5, 1.5 - 0.5 - 0.25, 1.0]))


def test_prompt_ignore_length_leaves_the_prompt_out_of_presence_and_frequency() -> None:
    from inflight.engine.sampler import _adjust

    logits = torch.tensor([1.0, 2.0, 3.0])
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0}

    _adjust(logits, make_sequence(prompt=(0, 0), generated=(1,), prompt_ignore_length=99, **penalties))

    assert logits.tolist() == [0.5, 0.25, 3.0]  # the repetition penalty counts the prompt all the same


def test_without_a_token_to_count_presence_and_frequency_change_nothing() -> None:
    from inflight.engine.sampler import _adjust

    logits = torch.tensor([1.0, 2.0])

    _adjust(logits, make_sequence(prompt=(0,), presence_penalty=0.5, prompt_ignore_length=1))

    assert logits.tolist() == [1.0, 2.0]


def test_log_probs_are_the_models_own() -> None:
    sequence = make_sequence(temperature=0.5, top_k=2, log_probs=True, top_log_probs=3, generation_logits=True)
    [row] = sample(LOGITS[None], [sequence])
    expected = LOGITS.log_softmax(-1)
    assert row.log_prob == pytest.approx(float(expected[row.token]))
    assert [token for token, _ in row.top] == [0, 1, 2]
    assert row.logits is not None
    assert row.logits.tolist() == LOGITS.tolist()


def test_broken_logits_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("llama"))
    real = engine._runner.run

    def broken(chunks: Any, copies: Any) -> Any:
        logits, context = real(chunks, copies)
        logits = logits.clone()
        logits[0] = torch.nan
        return logits, context

    monkeypatch.setattr(engine._runner, "run", broken)
    first, second = ask([1, 2], 1), ask([3, 4], 1)
    outputs = run(engine, [first, second])
    assert "not numbers" in str(outputs[first.key].error)
    assert len(outputs[second.key].tokens) == 1
