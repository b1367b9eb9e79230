"""The replay engine: it says the prompt again, at its pace, and refuses whatever would change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.loop import EngineLoop
from inflight.engine.replay import Pace, ReplayEngine
from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.errors import EngineFailure, UnsupportedFeature
from inflight.settings.deployment import EngineSettings
from tests.engine.support.driving import ask
from tests.support.waiting import wait_until

MS = 1_000_000
"""Nanoseconds."""
AT_ONCE = Pace()


class Clock:
    """A clock that is set."""

    now_ns = 10**18

    def __call__(self) -> int:
        return self.now_ns


def _engine(max_batch_size: int = 8, pace: Pace = AT_ONCE, clock: Callable[[], int] = now_ns) -> ReplayEngine:
    return ReplayEngine(EngineConfig(Path(), max_batch_size=max_batch_size), pace, clock)


def _drive(
    engine: ReplayEngine, clock: Clock, arrivals: dict[int, Request], late_ns: int = 0
) -> dict[int, tuple[RequestMetrics, list[int]]]:
    """Submit requests at their times (since the clock's start) and step whenever a step is due, ``late_ns`` too late.

    Returns by key the metrics and the times of the tokens, since the clock's start.
    """
    start, pending = clock.now_ns, sorted(arrivals.items(), key=lambda item: item[0])
    times: dict[int, list[int]] = {request.key: [] for request in arrivals.values()}
    done = {}
    while pending or engine.busy:
        due = clock.now_ns + round(engine.due_in_s * 1e9) + late_ns if engine.busy else 2**63
        if pending and start + pending[0][0] <= due:
            at, request = pending.pop(0)
            clock.now_ns = max(clock.now_ns, start + at)
            request.arrival_ns = start + at
            engine.submit(request)
        else:
            clock.now_ns = due
        for output in engine.step():
            times[output.key] += [clock.now_ns - start] * len(output.tokens)
            if output.finished:
                assert output.metrics is not None
                done[output.key] = (output.metrics, times[output.key])
    return done


def _run(engine: ReplayEngine, *requests: Request) -> list[Output]:
    """Submit requests and step until all have ended; return their joined outputs, in the order of the requests."""
    outputs: dict[int, Output] = {}
    for request in requests:
        engine.validate(request)
        engine.submit(request)
    while engine.busy:
        for output in engine.step():
            known = outputs.setdefault(output.key, Output(output.key))
            assert not known.finished, "an output came after the last one"
            known.extend(output)
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
        ({"prompt_log_probs": 0}, "num_prompt_log_probs"),
        ({"log_prob_ids": (1,)}, "log_prob_token_ids"),
        ({"pooling": "mean"}, "pooling"),
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
    assert (engine.stats.state().active, engine.stats.state().step.sequences, engine.stats.state().waiting) == (0, 0, 0)
    assert [output.tokens for output in _run(engine, ask([8], 2))] == [[8, 8]]


def test_figures_are_those_of_a_real_engine() -> None:
    """Two run and one waits; a first step is its prompt's, later ones generate; idle, nothing is shown."""
    engine, stats = _engine(max_batch_size=2), []
    for request in (ask([1, 2, 3], 2), ask([4, 5], 3), ask([6], 2)):
        engine.submit(request)
    assert engine.num_waiting == 3
    while engine.busy:
        engine.step()
        now = engine.stats.state()
        stats.append((now.active, *now.step[:4]))
        assert now.waiting == engine.num_waiting
    assert stats == [(3, 2, 2, 0, 5), (2, 2, 0, 2, 0), (1, 2, 1, 1, 1), (0, 0, 0, 0, 0)]
    assert engine.stats.steps == 4
    assert engine.stats.batch_size_limit == 2


def test_every_time_is_what_the_pace_says_whatever_runs_beside() -> None:
    clock = Clock()
    engine = _engine(8, Pace(0.020, 0.050, 0.010), clock)
    arrivals = {index * 3 * MS + index: ask([5], 6) for index in range(8)}
    done = _drive(engine, clock, arrivals)
    for arrival, request in arrivals.items():
        metrics, times = done[request.key]
        assert [time - arrival for time in times] == [70 * MS + index * 10 * MS for index in range(6)]
        assert metrics.first_scheduled_ns - metrics.arrival_ns == 20 * MS
        assert metrics.first_token_ns - metrics.arrival_ns == 70 * MS
        assert metrics.last_token_ns - metrics.first_token_ns == 50 * MS


def test_lateness_does_not_add_up() -> None:
    clock = Clock()
    engine, request = _engine(1, Pace(0.020, 0.050, 0.010), clock), ask([5], 200)
    _, times = _drive(engine, clock, {0: request}, late_ns=MS // 4)[request.key]
    assert {late - (70 + index * 10) * MS for index, late in enumerate(times)} == {MS // 4}


def test_the_capacity_is_what_the_pace_says() -> None:
    """More than fit arrive at once: a place serves one after the other, in turn, and waiting overlaps with running."""
    clock, pace, tokens = Clock(), Pace(0.020, 0.050, 0.010), 11
    requests = [ask([5], tokens) for _ in range(20)]
    done = _drive(_engine(4, pace, clock), clock, dict(enumerate(requests)), MS // 10)
    served_ms = 50 + (tokens - 1) * 10
    for index, request in enumerate(requests):
        metrics, _ = done[request.key]
        expected = (20 + index // 4 * served_ms) * MS + index % 4
        assert metrics.first_scheduled_ns - metrics.arrival_ns + index == expected
    last = max(metrics.last_token_ns for metrics, _ in done.values())
    first = min(metrics.first_scheduled_ns for metrics, _ in done.values())
    assert abs((last - first) / MS - 20 / 4 * served_ms) < 1


def test_a_cancelled_requests_place_is_free_at_once() -> None:
    clock = Clock()
    engine, first, second, third = _engine(1, Pace(0, 0.050, 0.010), clock), ask([5], 99), ask([6], 2), ask([7], 2)
    for request in (first, second, third):
        engine.submit(request)
    engine.step()
    clock.now_ns += 30 * MS
    for request in (first, third):
        engine.cancel(request.key)
    assert engine.due_in_s == 0
    assert [output.finish_reason for output in engine.step()] == [FinishReason.CANCELLED] * 2
    assert engine.due_in_s == pytest.approx(0.050)
    clock.now_ns += 50 * MS
    assert [output.tokens for output in engine.step()] == [[6]]


def test_a_step_alone_is_a_clock_for_all() -> None:
    clock = Clock()
    requests = [ask([5], 3), ask([6], 3)]
    done = _drive(_engine(8, Pace(step_s=0.010), clock), clock, {MS: requests[0], 4 * MS: requests[1]})
    assert [times for _, times in done.values()] == [[10 * MS, 20 * MS, 30 * MS]] * 2


def test_steps_keep_their_pace() -> None:
    outputs: list[Output] = []
    loop = EngineLoop(_engine(pace=Pace(0.005, 0.020, 0.010)), outputs.append, max_queue_size=10)
    loop.submit(ask([5], 6))
    assert wait_until(lambda: outputs and outputs[-1].finished)
    loop.close()
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert metrics.first_scheduled_ns - metrics.arrival_ns == 5 * MS
    assert metrics.first_token_ns - metrics.arrival_ns >= 25 * MS
    assert metrics.last_token_ns - metrics.arrival_ns >= 75 * MS


def test_it_runs_in_the_engines_loop() -> None:
    outputs: list[Output] = []
    loop = EngineLoop(_engine(), outputs.append, max_queue_size=10)
    requests = [ask([index, 77], 5) for index in range(10)]
    loop.submit(*requests)
    assert wait_until(lambda: sum(output.finished for output in outputs) == len(requests))
    loop.close()
    tokens = {
        request.key: [token for out in outputs if out.key == request.key for token in out.tokens]
        for request in requests
    }
    assert list(tokens.values()) == [[index, 77, index, 77, index] for index in range(10)]


@pytest.mark.parametrize("pace", [float("inf"), float("nan"), 3_600_001.0, -1.0])
def test_a_pace_that_is_none_is_refused_by_name(pace: float) -> None:
    with pytest.raises(ValidationError, match="replay_step_ms"):
        EngineSettings(kind="replay", replay_step_ms=pace)
