"""How searches end, and random ones on a small cache: each ends exactly once, and no block is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.clock import now_ns
from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import DeadlineExceeded, EngineFailure, InvalidRequest, UnsupportedFeature
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, assert_idle, finish, load
from tests.engine.support.searching import assert_found, some_ends

OFF, NGRAM = SpeculationSettings(), SpeculationSettings(method="ngram", adaptive=False)
LAST_START = 8
PROMPTS = [[5, 17, 80, 3, 44, 8, 120], [5, 17, 80, 3, 9], [*range(30, 43)]]


@dataclass(frozen=True)
class Plan:
    """A request, and the steps at which it comes and is cancelled."""

    prompt: list[int]
    max_tokens: int
    more: dict[str, Any]
    start: int
    end: int | None


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(checkpoint("llama"))


def steps(engine: Engine, request: Request, count: int) -> None:
    engine.submit(request)
    for _ in range(count):
        assert engine.step() == []


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_cancelled_search_has_the_beams_so_far(engine: Engine, count: int) -> None:
    request = ask(PROMPTS[0], 20, beam_width=3)
    steps(engine, request, count)
    engine.cancel(request.key)
    output = finish(engine)[request.key]
    assert output.finish_reason is FinishReason.CANCELLED
    assert output.beams is not None
    assert {len(beam.tokens) for beam in output.beams} == {count}
    assert len(output.beams) == (3 if count else 1)
    assert [beam.score for beam in output.beams] == sorted((beam.score for beam in output.beams), reverse=True)


def test_a_deadline_ends_a_search_with_the_beams_so_far(engine: Engine) -> None:
    request = ask(PROMPTS[0], 20, beam_width=3, deadline_ns=now_ns() + 10**12)
    steps(engine, request, 4)
    engine._scheduler._clock = lambda: now_ns() + 10**13
    try:
        output = finish(engine)[request.key]
    finally:
        engine._scheduler._clock = now_ns
    assert output.finish_reason is FinishReason.DEADLINE
    assert output.beams is not None
    assert [len(beam.tokens) for beam in output.beams] == [4, 4, 4]


def test_a_deadline_before_the_first_token_is_an_error(engine: Engine) -> None:
    request = ask(PROMPTS[0], 20, beam_width=3, deadline_ns=now_ns() - 1)
    engine.submit(request)
    output = finish(engine)[request.key]
    assert isinstance(output.error, DeadlineExceeded)
    assert output.beams is None


def test_a_step_that_fails_ends_a_search_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, other = ask(PROMPTS[0], 20, beam_width=3), ask(PROMPTS[1], 20)
    engine.submit(other)
    steps(engine, searched, 0)
    for _ in range(3):
        engine.step()

    def fail(*_: object) -> Any:
        raise RuntimeError("a fault, made by the test")

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "run", fail)
        outputs = engine.step()
    assert {output.key for output in outputs} == {searched.key, other.key}
    assert all(isinstance(output.error, EngineFailure) for output in outputs)
    assert len(outputs) == 2
    assert not engine.busy
    assert_idle(engine)


def test_logits_that_are_no_numbers_end_a_search_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, other = ask(PROMPTS[0], 20, beam_width=3), ask(PROMPTS[1], 6)
    engine.submit(searched)
    engine.submit(other)
    engine.step()
    run = engine._runner.run

    def spoil(*arguments: Any) -> Any:
        logits, context = run(*arguments)
        logits = logits.clone()
        rows = [row for row, chunk in enumerate(arguments[0]) if chunk.sequence.request.sampling.beam_width > 1]
        logits[rows[1]] = float("nan")
        return logits, context

    with monkeypatch.context() as patched:
        patched.setattr(engine._runner, "run", spoil)
        [failed] = [output for output in engine.step() if output.finished]
    assert failed.key == searched.key
    assert isinstance(failed.error, EngineFailure)
    assert finish(engine)[other.key].finish_reason is FinishReason.LENGTH


def test_when_everything_fails_searches_do_too(engine: Engine) -> None:
    request = ask(PROMPTS[0], 20, beam_width=3)
    steps(engine, request, 3)
    [output] = engine.fail_all(EngineFailure("a fault, made by the test"))
    assert (output.key, type(output.error), output.beams) == (request.key, EngineFailure, None)
    assert_idle(engine)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"beam_width": 33}, InvalidRequest, "beam_width is 33; it must be at most 32"),
        ({"beam_width": 8, "max_tokens": 400}, InvalidRequest, "blocks of the KV cache, which has 256"),
        ({"beam_width": 2, "temperature": 0.5}, UnsupportedFeature, "temperature"),
        ({"beam_width": 2, "temperature": 1.0, "top_k": 5}, UnsupportedFeature, "top_k"),
        ({"beam_width": 2, "stop_strings": ("x",)}, UnsupportedFeature, "stop_words"),
        ({"beam_width": 2, "top_log_probs": 3}, UnsupportedFeature, "num_top_log_probs"),
        ({"beam_width": 2, "generation_logits": True}, UnsupportedFeature, "return_generation_logits"),
        ({"beam_width": 30, "end_ids": frozenset(range(300))}, InvalidRequest, "it must be at most 20"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(engine: Engine, more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        engine.validate(ask(PROMPTS[0], **({"max_tokens": 8} | more)))


@st.composite
def requests(draw: st.DrawFn) -> Plan:
    """When a search or an ordinary request comes, and when it is cancelled, if it is."""
    prompt, width = draw(st.sampled_from(PROMPTS)), draw(st.sampled_from([1, 2, 3, 4]))
    more: dict[str, Any] = {"priority": draw(st.integers(0, 1))}
    if width > 1:
        ends = draw(st.sampled_from([frozenset(), some_ends("llama", prompt, 10)]))
        more |= {"beam_width": width, "end_ids": ends, "early_stopping": draw(st.booleans())}
    start, life = draw(st.integers(0, LAST_START)), draw(st.none() | st.none() | st.integers(0, 12))
    return Plan(prompt, draw(st.sampled_from([1, 6])), more, start, None if life is None else start + life)


@pytest.mark.proof
@given(
    st.lists(requests(), min_size=1, max_size=7),
    st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([22, 24, 40]),
            "mode": st.sampled_from(["inflight", "inflight", "static"]),
            "fairness": st.sampled_from(["none", "client"]),
            "eviction": st.sampled_from(["lru", "lfu", "prefix"]),
            "offload_to": st.sampled_from(["none", "host", "file"]),
            "offload_bytes": st.just(1 << 16),
            "offload_min_tokens": st.just(1),
            "prefill_chunk_tokens": st.sampled_from([None, 3]),
            "speculation": st.sampled_from([OFF, OFF, NGRAM]),
            "max_tokens_per_step": st.sampled_from([2, 7, 64]),
            "max_batch_size": st.sampled_from([4, 9]),
            "policy": st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
            "prefix_reuse": st.booleans(),
        }
    ),
)
def test_random_searches_end_once_with_their_beams(plans: list[Plan], config: dict[str, Any]) -> None:
    engine = load(checkpoint("llama"), **config)
    sent = [(plan, ask(plan.prompt, plan.max_tokens, **plan.more)) for plan in plans]
    outputs: dict[int, list[Output]] = {request.key: [] for _, request in sent}
    for step in range(1000):
        for plan, request in sent:
            if plan.start == step:
                engine.validate(request)
                engine.submit(request)
            if plan.end == step:
                engine.cancel(request.key)
        for output in engine.step():
            outputs[output.key].append(output)
        engine._cache.check()
        if step > LAST_START and not engine.busy:
            break
    assert_idle(engine)
    for plan, request in sent:
        check(plan, request, outputs[request.key])


def check(plan: Plan, request: Request, own: list[Output]) -> None:
    """The request has ended once: with the tokens of transformers, or with a part of them where it was cancelled."""
    assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
    tokens = [token for output in own for token in output.tokens]
    if own[-1].finish_reason is FinishReason.CANCELLED:
        assert plan.end is not None
        assert (own[-1].beams is None) == (request.sampling.beam_width == 1)
    elif request.sampling.beam_width > 1:
        assert not tokens
        assert_found("llama", request, own[-1])
    else:
        assert tokens == greedy("llama", tuple(plan.prompt), plan.max_tokens)
