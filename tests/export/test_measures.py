"""Quality, measured on models whose answers are known."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from inflight.export.data import Example
from inflight.export.quantize.modelopt import Sensitivity, choose_kept
from inflight.export.stages import Journal
from inflight.export.verify.measures import LayerError, Quality, kl_divergence, measure
from inflight.export.verify.report import check, dearest, shortfalls
from inflight.settings.deployment import QualitySettings
from tests.support.progress import silent

VOCAB, END = 8, 7


class Counting:
    """A model that says with ``confidence`` that the next token is one more, and the end after 5."""

    def __init__(self, confidence: float, forgets_after: int = 10**6) -> None:
        self._confidence, self._forgets_after = confidence, forgets_after

    def logits(self, tokens: Sequence[int], first: int = 0) -> Tensor:
        rest = (1 - self._confidence) / (VOCAB - 1)
        rows = torch.full((len(tokens), VOCAB), rest)
        for position, token in enumerate(tokens):
            likely = (END if token == 5 else token + 1) if position < self._forgets_after else 0
            rows[position, likely] = self._confidence
        return rows.log()[first:]


WHOLE = [LayerError("model.layers.0", "model.layers.0.mlp.up_proj", 0.03, None, "")]
EXAMPLES = [Example((1, 2), (3, 4, 5), True), Example((2,), (3, 4, 5), True), Example((), (1, 2, 3, 4), False)]


def test_perplexity_and_divergence_are_those_of_the_distributions() -> None:
    found = measure(Counting(0.8), Counting(0.5), EXAMPLES, [], {END}, silent, Journal())
    assert found.perplexity == (pytest.approx(1 / 0.8), pytest.approx(1 / 0.5))
    expected = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log((0.2 / 7) / (0.5 / 7))
    assert found.kl_divergence == pytest.approx(expected, rel=1e-4)
    assert found.kl_of_examples == pytest.approx([expected] * 3, rel=1e-2)
    assert (found.exact, found.asked) == ((2, 2), 2)


def test_equal_models_differ_in_nothing() -> None:
    found = measure(Counting(0.6), Counting(0.6), EXAMPLES, EXAMPLES[:1], {END}, silent, Journal())
    assert found.kl_divergence == pytest.approx(0, abs=1e-6)
    assert found.perplexity_increase == pytest.approx(0)
    assert (found.exact, found.recalled) == ((2, 2), (1, 1))
    assert shortfalls(check(found, WHOLE, QualitySettings())) == []


def test_an_answer_is_exact_only_with_its_end_and_within_memory() -> None:
    unended = Example((1, 2), (3, 4), True)
    found = measure(Counting(0.9), Counting(0.9, forgets_after=1), [unended], EXAMPLES[:1], {END}, silent, Journal())
    assert found.exact == (0, 0)
    assert found.exact_match is None
    assert found.recalled == (1, 0)


def test_what_falls_short_is_named_with_its_layers() -> None:
    examples, recall = [*EXAMPLES, *EXAMPLES[:2] * 4], EXAMPLES[:1] * 10
    found = measure(Counting(0.8), Counting(0.3, forgets_after=3), examples, recall, {END}, silent, Journal())
    errors = [
        LayerError("model.layers.0", "model.layers.0.mlp.up_proj", 0.03, 1.1, "model.layers.0.mlp.up_proj"),
        LayerError("model.layers.3", "model.layers.3.mlp.up_proj", 3.0, 0.25, "KV cache"),
    ]
    assert shortfalls(check(found, errors, QualitySettings())) == [
        "max_perplexity_increase is +214.96%, the limit +0.50%",
        "max_kl_divergence is 0.66 nats, the limit 0.05 nats",
        "min_exact_match is 0.0%, the limit 90.0%",
        "min_long_context_recall is 0.0%, the limit 80.0%",
        "max_weight_error is 300.0%, the limit 40.0%, in model.layers.3.mlp.up_proj",
        "min_range is 25.0%, the limit 35.0%, in model.layers.3, KV cache",
    ]
    assert dearest(errors, {"model.layers.3": 0.5, "model.layers.0": 0.1}) == [
        "most is lost in model.layers.3: 0.5000 nats; its up_proj is off by 300.0%; its KV cache keeps only 0.25 of "
        "the largest value",
        "most is lost in model.layers.0: 0.1000 nats; its up_proj is off by 3.0%",
    ]


def test_what_the_original_cannot_do_is_not_held_against_the_other() -> None:
    nothing = Quality((2.0, 2.0), 0.0, exact=(0, 0), asked=5, recalled=(0, 0), recall_asked=5)
    assert all(one.passes for one in check(nothing, WHOLE, QualitySettings()))


def test_a_share_of_a_few_answers_tells_nothing() -> None:
    few = Quality((2.0, 2.0), 0.0, exact=(3, 2), asked=50, recalled=(9, 0), recall_asked=50)
    assert (few.exact_match, few.long_context_recall) == (None, None)
    enough = Quality((2.0, 2.0), 0.0, exact=(10, 5), asked=50, recalled=(20, 19), recall_asked=50)
    assert (enough.exact_match, enough.long_context_recall) == (0.5, 0.95)


def test_divergence_is_zero_only_between_equal_rows() -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(kl_divergence(logits, logits + 3.0), torch.zeros(4), atol=1e-6)
    assert (kl_divergence(logits, logits.flip(0)) > 0.01).all()


def test_the_most_sensitive_layers_are_kept_until_the_rest_fits() -> None:
    found = [Sensitivity((f"l{loss}",), loss) for loss in (0.4, 0.1, 0.3, 0.2)]
    assert choose_kept(found, 1.0) == ()
    assert choose_kept(found, 0.65) == ("l0.4",)
    assert choose_kept(found, 0.3) == ("l0.3", "l0.4")
    assert choose_kept(found, 0.0) == ("l0.1", "l0.2", "l0.3", "l0.4")
