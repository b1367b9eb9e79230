"""The replay engine: it says the prompt again, at its pace, and refuses whatever would change nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from inflight.engine.config import EngineConfig
from inflight.engine.loop import EngineLoop
from inflight.engine.replay import ReplayEngine
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import EngineFailure, UnsupportedFeature
from inflight.triton.responses import join
from tests.engine.driving import ask


def _engine(max_batch_size: int = 8, step_s: float = 0.0) -> ReplayEngine:
    return ReplayEngine(EngineConfig(Path(), max_batch_size=max_batch_size), step_s)


def _run(engine: ReplayEngine, *requests: Request) -> list[Output]:
    """Submit requests and step until all have ended; return their joined outputs, in the order of the requests."""
    outputs: dict[int, Output] = {}
    for request in requests:
        engine.validate(request)
        engine.submit(request)
    while engine.busy:
        for output in engine.step():
            known = outputs.get(output.key)
            assert known is None or not known.finished, "an output came after the last one"
            outputs[output.key] = join(known, output)
    return [outputs[request.key] for request in requests]


def test_the_prompt_comes_back_until_max_tokens() -> None:
    long, short = _run(_engine(), ask([5, 6, 7], 8), ask([9], 2))
    assert long.tokens == [5, 6, 7, 5, 6, 7, 5, 6]
    assert short.tokens == [9, 9]
    for output, prompt in ((long, 3), (short, 1)):
        assert output.finish_reason is FinishReason.LENGTH
        assert output.metrics is not None
        assert (output.metrics.prompt_tokens, output.metrics.generated_tokens) == (prompt, len(output.tokens))
        assert 0 < output.metrics.first_token_ns <= output.metrics.last_token_ns


def test_what_every_request_has_is_taken() -> None:
    [output] = _run(_engine(), ask([5], 3, end_ids=frozenset({5}), ignore_eos=True, seed=7))
    assert output.tokens == [5, 5, 5]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 1}, "top_k"),
        ({"top_p": 0.9}, "top_p"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"stop_strings": ("x",)}, "stop_strings"),
        ({"stop_sequences": ((1,),)}, "stop_words_list"),
        ({"bad_sequences": ((1,),)}, "bad_words_list"),
        ({"logit_bias": {1: 1.0}}, "embedding_bias"),
        ({"log_probs": True}, "return_log_probs"),
        ({"top_log_probs": 2}, "num_top_log_probs"),
        ({"context_logits": True}, "return_context_logits"),
        ({"generation_logits": True}, "return_generation_logits"),
        ({"priority": -1}, "priority"),
        ({"deadline_ns": 2**62}, "deadline_ms"),
    ],
    ids=str,
)
def test_what_it_would_ignore_is_refused_by_name(more: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not supported by the replay engine"):
        _engine().validate(ask([5], 3, **more))


def test_a_cancelled_request_ends_with_the_next_step() -> None:
    engine, request, other = _engine(), ask([5, 6], 100), ask([7], 4)
    for one in (request, other):
        engine.submit(one)
    engine.step()
    engine.cancel(request.key)
    engine.cancel(12345)  # has ended long ago
    outputs = {output.key: output for output in engine.step()}
    assert outputs[request.key].finish_reason is FinishReason.CANCELLED
    assert outputs[other.key].tokens == [7]


def test_a_failure_ends_all_of_them_once() -> None:
    engine, requests = _engine(), [ask([5], 9), ask([6], 9)]
    for request in requests:
        engine.submit(request)
    engine.step()
    outputs = engine.fail_all(EngineFailure("told to"))
    assert [output.key for output in outputs if output.error] == [request.key for request in requests]
    assert not engine.busy
    assert (engine.stats.active, engine.stats.scheduled, engine.stats.waiting) == (0, 0, 0)
    assert [output.tokens for output in _run(engine, ask([8], 2))] == [[8, 8]]


def test_figures_are_those_of_a_real_engine() -> None:
    """Two run and one waits; a first step is its prompt's, later ones generate; idle, nothing is shown."""
    engine, stats = _engine(max_batch_size=2), []
    for request in (ask([1, 2, 3], 2), ask([4, 5], 3), ask([6], 2)):
        engine.submit(request)
    assert engine.waiting == 1
    while engine.busy:
        engine.step()
        now = engine.stats
        stats.append((now.active, now.scheduled, now.context, now.generation, now.total_context_tokens))
        assert now.waiting == engine.waiting
    assert stats == [(3, 2, 2, 0, 5), (2, 2, 0, 2, 0), (1, 2, 1, 1, 1), (0, 0, 0, 0, 0)]
    assert engine.stats.iterations == 4
    assert engine.stats.max == 2


def test_steps_keep_their_pace() -> None:
    engine = _engine(step_s=0.01)
    started = time.monotonic()
    _run(engine, ask([5], 6))
    assert time.monotonic() - started >= 5 * 0.01


def test_it_runs_in_the_engines_loop() -> None:
    outputs: list[Output] = []
    loop = EngineLoop(_engine(), outputs.append, max_queue_size=10)
    requests = [ask([index, 77], 5) for index in range(10)]
    loop.submit(*requests)
    deadline = time.monotonic() + 10
    while sum(output.finished for output in outputs) < len(requests):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    loop.close()
    tokens = {
        request.key: [token for out in outputs if out.key == request.key for token in out.tokens]
        for request in requests
    }
    assert list(tokens.values()) == [[index, 77, index, 77, index] for index in range(10)]
