"""Steps launched ahead: on a CPU, where the next step is launched from tokens that the host has not read, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from inflight.engine.chunk import Chunk
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.request import FinishReason, Output, Request
from inflight.engine.sampler import PendingSample
from inflight.errors import EngineFailure, ShuttingDown
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, assert_idle, finish, load, run
from tests.engine.support.schedules import Arrival, Schedule, schedules
from tests.support.properties import examples

PROMPTS = [tuple(range(5, 25)), (3,), (20, 30, 40)]
SETTINGS = {
    ("block_size", "num_blocks"): st.sampled_from(((1, 96), (4, 30), (4, 64), (8, 18))),
    "prefix_reuse": st.booleans(),
    "offload_to": st.sampled_from(("none", "host")),
    "offload_bytes": st.just(1 << 16),
    "offload_min_tokens": st.just(1),
    "max_batch_size": st.integers(3, 8),
    "max_tokens_per_step": st.integers(4, 48),
    "prefill_chunk_tokens": st.sampled_from((None, 3, 16)),
    "policy": st.sampled_from(("guaranteed_no_evict", "max_utilization")),
    "mode": st.sampled_from(("inflight", "inflight", "dynamic", "static")),
    "max_queue_delay_ms": st.just(0.0),
    "fairness": st.sampled_from(("none", "client")),
}
CROWD = Schedule(
    "llama",
    {"block_size": 4, "num_blocks": 30, "max_batch_size": 8, "max_tokens_per_step": 40, "policy": "max_utilization"},
    tuple(Arrival(place % 4, place % 3, 40 - place, place % 2 * 60, 12, place % 2) for place in range(12)),
)


@pytest.fixture(autouse=True)
def _overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", True)


def _engine(**more: Any) -> Engine:
    return load(checkpoint("llama"), **{"max_batch_size": 4, "max_tokens_per_step": 64} | more)


def _without(**more: Any) -> Engine:
    engine = _engine(**more)
    engine._overlap = None
    return engine


@pytest.mark.proof
@pytest.mark.property
def test_every_request_gets_what_it_would_get_alone() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples(0.1))
    @given(schedules(("llama", "gemma3"), SETTINGS))
    @example(CROWD)
    def check(schedule: Schedule) -> None:
        note(schedule.script())
        engine = schedule.run()
        seen.update(ahead=engine._overlap.launches, preemptions=engine.stats.preemptions)

    check()
    assert min(seen["ahead"], seen["preemptions"]) > 0, f"what it is for did not happen: {seen}"


def test_a_step_is_launched_before_the_one_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            order.append(name)
            return call(*arguments)

        return watched

    for owner, name in ((ModelRunner, "run"), (PendingSample, "wait")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    engine, request = _engine(), ask(PROMPTS[0], 5)
    assert run(engine, [request])[request.key].tokens == greedy("llama", PROMPTS[0], 5)
    assert order == ["run", *["run", "wait"] * 4, "wait"]
    assert engine.stats.steps == 5


def _facts(engine: Engine) -> dict[str, Any]:
    stats = engine.stats
    names = ("steps", "step_tokens", "step_sequences", "generated_tokens", "cached_tokens", "kv_blocks_reused")
    known = {name: getattr(stats, name) for name in names}
    cache = engine._cache
    return known | {"counts": cache.counts, "free": cache.num_free_blocks, "cached": cache.num_cached_blocks}


def test_the_books_are_those_of_an_engine_without() -> None:
    books, served = [], []
    for make in (_engine, _without):
        engine = make(fairness="client")
        requests = [ask(prompt, 6 + 3 * place, client_id=str(place)) for place, prompt in enumerate(PROMPTS)]
        outputs = run(engine, requests)
        books.append(_facts(engine) | {"tokens": [outputs[one.key].tokens for one in requests]})
        books[-1]["steps of each"] = [outputs[one.key].metrics.steps for one in requests]  # type: ignore[union-attr]
        served.append([engine._scheduler._queue._clients[str(place)].served_tokens for place in range(3)])
        assert engine._overlap is None or engine._overlap.launches == 11
    assert books[0] == books[1]
    assert served[0] == served[1]


@pytest.mark.parametrize("kind", ["end id", "stop sequence", "cancelled"])
def test_an_end_that_was_not_foreseen_costs_a_row_and_nothing_else(kind: str) -> None:
    engine, expected = _engine(num_blocks=20), greedy("llama", PROMPTS[0], 12)
    end = expected.index(expected[4])
    more: dict[str, Any] = {"end id": {"end_ids": frozenset({expected[4]})}, "stop sequence": {}}.get(kind, {})
    if kind == "stop sequence":
        more = {"stop_sequences": ((expected[4],),)}
    first, second = ask(PROMPTS[0], 12, **more), ask(PROMPTS[1], 12)
    for request in (first, second):
        engine.submit(request)
    outputs: dict[int, list[Output]] = {first.key: [], second.key: []}
    while not (outputs[first.key] and outputs[first.key][-1].finished):
        if kind == "cancelled" and len(outputs[first.key]) == 4:
            engine.cancel(first.key)
        for output in engine.step():
            outputs[output.key].append(output)
    dropped = engine._overlap._launched
    assert dropped is not None
    assert kind == "cancelled" or first.key in {chunk.sequence.request.key for chunk in dropped.chunks}
    third = ask((7, *PROMPTS[0]), 12)  # its blocks are those that the dropped row stored in
    engine.submit(third)
    rest = finish(engine)
    tokens = [token for output in outputs[first.key] for token in output.tokens]
    assert tokens == expected[: 4 if kind == "cancelled" else end + (kind == "stop sequence")]
    before = [token for output in outputs[second.key] for token in output.tokens]
    assert before + rest[second.key].tokens == greedy("llama", PROMPTS[1], 12)
    assert rest[third.key].tokens == greedy("llama", (7, *PROMPTS[0]), 12)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5},
        {"temperature": 1.3, "seed": 6, "log_probs": True, "top_log_probs": 3},
        {"min_tokens": 6, "end_ids": frozenset(range(0, 320, 3)), "generation_logits": True},
        {"logit_bias": {7: 4.0, 9: 5.0}, "log_probs": True},
    ],
)
def test_what_is_asked_of_a_token_is_as_without(more: dict[str, Any]) -> None:
    def given_out(engine: Engine) -> list[Any]:
        requests = [ask(prompt, 9, **more) for prompt in PROMPTS]
        outputs = run(engine, requests)
        found = [outputs[one.key] for one in requests]
        logits = [np.array(one.generation_logits or []).tolist() for one in found]
        return [(one.tokens, one.log_probs, one.top_log_probs) for one in found] + logits

    engine = _engine()
    assert given_out(engine) == given_out(_without())
    assert engine._overlap.launches > 0


@pytest.mark.parametrize(
    ("settings_", "more"),
    [
        ({}, {"repetition_penalty": 1.2}),
        ({}, {"bad_sequences": ((5, 6),)}),
        ({"block_size": 8}, {"beam_width": 2}),
        ({"speculation": SpeculationSettings(method="ngram")}, {}),
    ],
)
def test_what_needs_tokens_is_not_launched_ahead(settings_: dict[str, Any], more: dict[str, Any]) -> None:
    engine = _engine(**settings_)
    run(engine, [ask(PROMPTS[0], 8, **more), ask(PROMPTS[1], 8)])
    if engine._overlap is None:
        assert "speculation" in settings_
    else:
        assert engine._overlap.launches == 0 if settings_ else engine._overlap.launches <= 1


def test_who_finds_no_room_is_asked_again_when_there_may_be_some() -> None:
    engine = _engine(num_blocks=12, policy="guaranteed_no_evict")
    first, second, third = ask(PROMPTS[0], 20), ask(PROMPTS[0][1:], 20), ask((1,), 3)
    for request in (first, second):
        engine.submit(request)
    for _ in range(4):
        engine.step()
    assert engine._scheduler.num_waiting == 1
    assert engine._overlap.launches == 4, "what cannot join anyway keeps steps from being launched ahead"
    engine.submit(third)
    engine.cancel(second.key)
    outputs = finish(engine)
    assert outputs[third.key].tokens == greedy("llama", (1,), 3)
    fourth, fifth = ask(PROMPTS[0], 20), ask(PROMPTS[0][1:], 20)
    outputs = run(engine, [fourth, fifth])
    assert [outputs[one.key].tokens for one in (fourth, fifth)] == [
        greedy("llama", PROMPTS[0], 20), greedy("llama", PROMPTS[0][1:], 20)
    ]  # fmt: skip


def test_who_may_share_what_was_just_computed_is_asked_again() -> None:
    engine, prompt = _engine(num_blocks=16, policy="guaranteed_no_evict"), PROMPTS[0]
    first, second = ask(prompt, 20), ask(prompt, 20)
    for request in (first, second):
        engine.submit(request)
    engine.step()
    engine.step()
    assert engine._scheduler.num_waiting == 0
    finish(engine)


def test_chunks_of_prompts_are_launched_ahead() -> None:
    """All but the first: what a prompt goes on with is known, and beside it sequences decode."""
    engine = _engine(max_tokens_per_step=6)
    requests = [ask(PROMPTS[0], 4), ask(PROMPTS[1], 8)]
    outputs = run(engine, requests)
    assert [outputs[one.key].tokens for one in requests] == [greedy("llama", PROMPTS[0], 4), greedy("llama", (3,), 8)]
    assert engine._overlap.launches == engine.stats.steps - 1


def test_who_comes_joins_a_step_that_is_launched_ahead() -> None:
    engine = _engine()
    first, second = ask(PROMPTS[0], 12), ask(PROMPTS[2], 3)
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.submit(second)
    engine.step()  # was launched before it came
    launched = engine._overlap._launched
    assert launched is not None
    assert [chunk.sequence.request for chunk in launched.chunks] == [first, second]
    [begun] = [output for output in engine.step() if output.key == second.key]
    outputs = finish(engine)
    assert begun.tokens + outputs[second.key].tokens == greedy("llama", PROMPTS[2], 3)
    assert engine._overlap.launches == engine.stats.steps - 1


def test_who_waits_for_a_place_has_it_when_one_is_sure_to_end() -> None:
    engine = load(checkpoint("llama"), max_batch_size=1)
    requests = [ask(prompt, 4) for prompt in PROMPTS]
    outputs = run(engine, requests)
    assert [outputs[one.key].tokens for one in requests] == [greedy("llama", prompt, 4) for prompt in PROMPTS]
    assert engine.stats.steps == 12
    assert engine._overlap.launches == 11
    assert engine.stats.step_sequences == 12, "one at a time"


def test_what_is_being_computed_is_waited_for_and_shared() -> None:
    """Two prompts that begin alike: the second one joins when the first one's blocks are known, as without."""
    facts = []
    for make in (_engine, _without):
        engine = make()
        first, second = ask(PROMPTS[0], 6), ask((*PROMPTS[0][:17], 9), 6)
        engine.submit(ask(PROMPTS[2], 9))
        engine.step()
        engine.submit(first)
        engine.step()  # launched before the first came; behind it, its prompt
        engine.submit(second)
        outputs = finish(engine)
        assert outputs[second.key].tokens == greedy("llama", tuple(second.prompt), 6)
        facts.append((outputs[second.key].metrics.cached_tokens, engine.stats.cached_tokens))  # type: ignore[union-attr]
    assert facts[0] == facts[1]
    assert facts[0][0] >= 16


def test_context_logits_of_chunks_launched_ahead_are_as_without() -> None:
    found = []
    for make in (_engine, _without):
        engine = make(max_tokens_per_step=6)
        requests = [
            ask(PROMPTS[0], 3, context_logits=True),
            ask(PROMPTS[1], 9),
            ask(PROMPTS[2], 1, context_logits=True),
        ]
        outputs = run(engine, requests)
        found.append([outputs[one.key].context_logits for one in requests])
    for one, ahead, without in zip(requests, *found, strict=True):
        if not one.sampling.context_logits:
            continue
        assert ahead is not None
        assert len(ahead) == len(one.prompt)
        assert np.allclose(ahead, without, atol=1e-5)


def test_a_step_ahead_that_fails_leaves_nobody_with_what_was_not_copied() -> None:
    """One that joins with it would share a part of a block, whose copy was lost: it ends as well."""
    engine = _engine()
    run(engine, [ask(PROMPTS[0], 2)])
    first, second = ask(PROMPTS[2], 12), ask((*PROMPTS[0][:18], 9), 4)
    engine.submit(first)
    engine.step()
    engine.submit(second)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._overlap, "launch", lambda *_: 1 / 0)
        outputs = {output.key: output for output in engine.step()}
    assert {type(outputs[one.key].error) for one in (first, second)} == {EngineFailure}
    finish(engine)
    again = ask(second.prompt, 4)
    assert run(engine, [again])[again.key].tokens == greedy("llama", tuple(second.prompt), 4)


@torch.inference_mode()
def _spoil(chunks: list[Chunk], logits: torch.Tensor, request: Request) -> torch.Tensor:
    for row, chunk in enumerate(chunks):
        if chunk.sequence.request is request:
            logits[row] = torch.nan
    return logits


def test_what_is_no_number_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine()
    first, second = ask(PROMPTS[0], 8), ask(PROMPTS[1], 8)
    real = engine._runner.run

    def spoilt(chunks: list[Chunk], *rest: Any) -> Any:
        logits, context = real(chunks, *rest)
        return (_spoil(chunks, logits, first) if engine._scheduler.running[0].generated else logits), context

    monkeypatch.setattr(engine._runner, "run", spoilt)
    outputs = run(engine, [first, second])
    assert isinstance(outputs[first.key].error, EngineFailure)
    assert outputs[second.key].tokens == greedy("llama", PROMPTS[1], 8)


def test_a_step_ahead_that_fails_ends_its_requests_and_not_the_engine() -> None:
    engine = _engine()
    requests = [ask(prompt, 8) for prompt in PROMPTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._overlap, "launch", lambda *_: 1 / 0)
        outputs = run(engine, requests)
    assert all(isinstance(outputs[one.key].error, EngineFailure) for one in requests)
    again = ask(PROMPTS[0], 8)
    assert run(engine, [again])[again.key].tokens == greedy("llama", PROMPTS[0], 8)


def test_new_books_know_nothing_of_a_step_that_was_launched() -> None:
    engine = _engine()
    engine.submit(ask(PROMPTS[0], 8))
    engine.step()
    assert engine._overlap._launched is not None
    assert [type(output.error) for output in engine.fail_all(ShuttingDown("over"))][-1] is ShuttingDown
    assert_idle(engine)
    again = ask(PROMPTS[2], 8)
    output = run(engine, [again])[again.key]
    assert (output.tokens, output.finish_reason) == (greedy("llama", PROMPTS[2], 8), FinishReason.LENGTH)
