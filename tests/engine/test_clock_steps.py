"""A step of the machine's wall clock expires no deadline, delays none, and does not stall a replay."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.replay import Pace, ReplayEngine
from inflight.engine.request import FinishReason
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, finish, load

HOUR_S = 3600
STEPS = pytest.mark.parametrize("hours", [1, -1])


def _step_wall_clock(patch: pytest.MonkeyPatch, hours: int) -> None:
    seconds, nanoseconds = time.time, time.time_ns
    patch.setattr(time, "time", lambda: seconds() + hours * HOUR_S)
    patch.setattr(time, "time_ns", lambda: nanoseconds() + hours * HOUR_S * 10**9)


@STEPS
def test_the_clock_does_not_follow_a_step(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, before = time.monotonic_ns(), now_ns()
    _step_wall_clock(monkeypatch, hours)
    assert 0 <= now_ns() - before <= time.monotonic_ns() - passed


@STEPS
def test_a_running_engine_keeps_its_deadlines_and_times(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint("llama"), max_batch_size=1)
    half_an_hour_ns = HOUR_S * 10**9 // 2
    running, waiting = (ask([5, 6, 7], 8, ignore_eos=True, deadline_ns=now_ns() + half_an_hour_ns) for _ in range(2))
    engine.submit(running)
    engine.submit(waiting)
    given = engine.step()
    assert not any(output.finished for output in given)
    _step_wall_clock(monkeypatch, hours)
    outputs = finish(engine)
    assert {key: output.finish_reason for key, output in outputs.items()} == dict.fromkeys(
        (running.key, waiting.key), FinishReason.LENGTH
    )
    metrics = outputs[running.key].metrics
    assert metrics is not None
    assert metrics.arrival_ns <= metrics.first_token_ns <= metrics.last_token_ns
    assert engine.stats.request_duration.sum < 2 * half_an_hour_ns * 1e-9


@STEPS
def test_a_replay_goes_on_at_its_pace(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(queue_s=0, prefill_s=0, step_s=0.01)
    engine = ReplayEngine(EngineConfig(Path(), max_batch_size=1), pace)
    request = ask([5, 6, 7], 4)
    engine.submit(request)
    engine.step()
    _step_wall_clock(monkeypatch, hours)
    tokens = 0
    while engine.busy:
        assert engine.due_in_s <= 2 * pace.step_s
        time.sleep(engine.due_in_s)
        outputs = engine.step()
        assert len(outputs) <= 1
        tokens += sum(len(output.tokens) for output in outputs)
    assert tokens in (3, 4)
