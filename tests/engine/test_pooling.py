"""Embeddings: transformers' last hidden states, of the last token or the mean of all, and no token generated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.engine.request import FinishReason, Output
from inflight.errors import EngineFailure, InvalidRequest, UnsupportedFeature
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import ARCHITECTURES, PROMPTS, RECURRENT, checkpoint, reference
from tests.engine.support.driving import Engine, ask, load, run

CLOSE, CLOSE_OF_HYBRIDS = {"atol": 2e-4, "rtol": 1e-4}, {"atol": 2e-3, "rtol": 1e-4}
LONG = PROMPTS[-4]


def _embed(engine: Engine, prompt: list[int], pooling: str) -> Output:
    request = ask(prompt, 1, pooling=pooling)
    output = run(engine, [request])[request.key]
    assert output.finish_reason is FinishReason.STOP
    assert output.tokens == []
    assert output.embedding is not None
    assert output.embedding.dtype == np.float32
    return output


def _expected(name: str, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        decoder = reference(name).get_decoder()
        decoder = getattr(decoder, "model", decoder)  # Llama 4's decoder has the head
        states = decoder(torch.tensor([prompt])).last_hidden_state[0].double()
    return (states[-1] if pooling == "last" else states.mean(0)).float()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_what_transformers_has(name: str) -> None:
    sizes = {} if name in RECURRENT else {"max_tokens_per_step": 7}
    close = CLOSE_OF_HYBRIDS if name in RECURRENT else CLOSE
    engine = load(checkpoint(name), **sizes)
    for prompt in ([7], PROMPTS[11], LONG):
        for pooling in ("last", "mean"):
            output = _embed(engine, prompt, pooling)
            torch.testing.assert_close(torch.as_tensor(output.embedding), _expected(name, prompt, pooling), **close)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_neighbours_and_cached_prefixes_change_no_bit(pooling: str) -> None:
    alone = _embed(load(checkpoint("llama")), LONG, pooling).embedding
    engine = load(checkpoint("llama"), max_tokens_per_step=9, num_blocks=40, policy="max_utilization")
    requests = [ask(LONG, 1, pooling=pooling), *(ask(prompt, 9) for prompt in PROMPTS[10:16])]
    again = [ask(LONG, 1, pooling=pooling)]
    first, second = run(engine, requests), run(engine, again)
    assert np.array_equal(first[requests[0].key].embedding, alone)  # type: ignore[arg-type]
    assert np.array_equal(second[again[0].key].embedding, alone)  # type: ignore[arg-type]
    metrics = second[again[0].key].metrics
    assert metrics is not None
    assert bool(metrics.cached_tokens) == (pooling == "last"), "a mean needs each position, a last token does not"


def test_it_is_preempted_and_computed_again() -> None:
    prompt = list(range(1, 61))
    alone = _embed(load(checkpoint("llama")), prompt, "mean").embedding
    engine = load(checkpoint("llama"), policy="max_utilization", num_blocks=24, max_tokens_per_step=8)
    for index in range(3):
        engine.submit(ask([100 + index], 30))
    engine.step()
    low = ask(prompt, 1, priority=-1, pooling="mean")
    output = run(engine, [low])[low.key]
    assert output.metrics is not None
    assert output.metrics.preemptions > 0
    assert np.array_equal(output.embedding, alone)  # type: ignore[arg-type]


def test_no_logits_are_computed_and_the_whole_length_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("llama"), max_sequence_length=len(LONG), speculation=SpeculationSettings(method="ngram"))
    native = engine._runner._native
    assert native is not None
    real, rows = type(native).__call__, list[int]()
    monkeypatch.setattr(type(native), "__call__", lambda *args: rows.append(len(args[3])) or real(*args))
    _embed(engine, LONG, "mean")
    assert set(rows) == {0}
    with pytest.raises(InvalidRequest, match="prompt length"):
        engine.validate(ask([*LONG, 1], 1, pooling="last"))


def test_states_that_are_no_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("llama"))
    native = engine._runner._native
    assert native is not None
    monkeypatch.setattr(native, "hidden", lambda rows: torch.full((len(rows), 4), torch.nan))
    request = ask(LONG, 1, pooling="last")
    assert isinstance(run(engine, [request])[request.key].error, EngineFailure)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"log_probs": True}, "return_log_probs"),
        ({"prompt_log_probs": 0}, "num_prompt_log_probs"),
        ({"log_prob_ids": (1,)}, "log_prob_token_ids"),
        ({"context_logits": True}, "return_context_logits"),
        ({"stop_strings": ("x",)}, "stop_strings"),
        ({"beam_width": 2}, "beam_width"),
        ({"temperature": 0.5}, "temperature"),
    ],
    ids=str,
)
def test_what_it_would_ignore_is_refused_by_name(more: dict[str, Any], name: str) -> None:
    engine = load(checkpoint("llama"))
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not supported with pooling"):
        engine.validate(ask([5], 1, pooling="mean", **more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pooling": "max"}, "pooling is 'max'; it must be last or mean"),
        ({"prompt_log_probs": 21}, "num_prompt_log_probs is 21; it must be between 0 and 20"),
        ({"log_prob_ids": (5, 400)}, "log_prob_token_ids has token 400; it must be between 0 and"),
    ],
)
def test_bad_values_are_refused_by_name(more: dict[str, Any], message: str) -> None:
    engine = load(checkpoint("llama"))
    with pytest.raises(InvalidRequest, match=message):
        engine.validate(ask([5], 1, **more))
