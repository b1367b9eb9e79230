"""Faults: whatever raises, wherever, every request still ends exactly once, and the engine and its thread live on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inflight.engine.engine import Engine
from inflight.engine.loop import EngineLoop
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import EngineFailure, QueueFull, ShuttingDown
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import Collector, ask, assert_idle, finish, load, run
from tests.support.tokenizers import make_tokenizer

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine whose cache is idle after the test."""
    engine = load(checkpoint("llama"))
    yield engine
    assert not engine.busy
    assert_idle(engine)


def _raise(*_: object, **__: object) -> Any:
    raise RuntimeError("a fault, made by the test")


@pytest.fixture
def make_loop(engine: Engine) -> Iterator[Callable[..., tuple[EngineLoop, Collector]]]:
    """Loops that are closed after the test."""
    loops: list[EngineLoop] = []

    def make(max_queue_size: int = 10, **more: Any) -> tuple[EngineLoop, Collector]:
        collect = Collector()
        loops.append(EngineLoop(engine, collect, max_queue_size, **more))
        return loops[-1], collect

    yield make
    for loop in loops:
        loop.close()


def test_what_had_ended_is_told_although_the_step_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled request's last output is due with the next step; that step fails before it returns."""
    cancelled, other = ask(PROMPT, 50), ask(PROMPT, 50)
    for request in (cancelled, other):
        engine.submit(request)
    engine.step()
    engine.cancel(cancelled.key)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "schedule", _raise)
        with pytest.raises(RuntimeError):
            engine.step()
    outputs = {output.key: output for output in engine.fail_all(EngineFailure("failed"))}
    assert outputs[cancelled.key].finish_reason is FinishReason.CANCELLED
    assert isinstance(outputs[other.key].error, EngineFailure)


def test_what_ended_in_a_step_is_told_although_the_step_fails_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sequence of a step has its last token; booking the second one's raises."""
    ends, fails = ask(PROMPT, 1), ask([*PROMPT, 3], 5)
    for request in (ends, fails):
        engine.submit(request)
    monkeypatch.setattr(engine._sequences[fails.key], "append", _raise, raising=True)
    with pytest.raises(RuntimeError):
        engine.step()
    outputs = engine.fail_all(EngineFailure("failed"))
    assert {output.key: output.finish_reason for output in outputs if output.finished} == {
        ends.key: FinishReason.LENGTH,
        fails.key: None,
    }
    assert outputs[0].tokens == greedy("llama", tuple(PROMPT), 12)[:1]


def test_a_failing_step_fails_its_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting request was not in it: it goes on."""
    engine = load(checkpoint("llama"), max_batch_size=2)
    first, second, waiting = (ask(PROMPT, 6) for _ in range(3))
    for request in (first, second, waiting):
        engine.submit(request)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", _raise)
        outputs = engine.step()
    assert {output.key for output in outputs} == {first.key, second.key}
    assert all(isinstance(output.error, EngineFailure) and output.metrics for output in outputs)
    assert all("made by the test" not in str(output.error) for output in outputs)
    assert finish(engine)[waiting.key].tokens == greedy("llama", tuple(PROMPT), 6)


def test_nothing_of_a_failed_step_is_reused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that it should have filled hold nothing that another request may share."""
    prompt = list(range(40, 60))
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", _raise)
        run(engine, [ask(prompt, 4)])
    assert engine._cache.num_cached_blocks == 0
    assert run(engine, [ask(prompt, 4)]).popitem()[1].tokens == greedy("llama", tuple(prompt), 4)


@pytest.mark.parametrize("whole", [False, True])
def test_the_figures_of_an_engine_that_failed_show_it_idle(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    for _ in range(3):
        engine.submit(ask(PROMPT, 50))
    engine.step()
    assert engine.stats.state().active == 3
    if whole:
        engine.fail_all(EngineFailure("failed"))
    else:
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", _raise)
            engine.step()
    stats = engine.stats
    assert (
        stats.state().active,
        stats.state().step.sequences,
        stats.state().waiting,
        stats.state().kv_blocks_used,
    ) == (0, 0, 0, 0)


def test_a_request_that_cannot_be_taken_ends_alone(
    engine: Engine, make_loop: Callable[..., tuple[EngineLoop, Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine._tokenizer = make_tokenizer("byte level")
    monkeypatch.setattr("inflight.engine.engine.StopTextLimit", _raise)
    loop, collect = make_loop()
    bad, good = ask(PROMPT, 3, stop_strings=("x",)), ask(PROMPT, 3)
    loop.submit(bad)
    loop.submit(good)
    [failed, ended] = collect.wait(bad, good)
    assert isinstance(failed.error, EngineFailure)
    assert ended.finish_reason is FinishReason.LENGTH


def test_a_fault_while_cancelling_ends_what_runs_with_an_error(
    engine: Engine, make_loop: Callable[..., tuple[EngineLoop, Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, collect = make_loop()
    first = ask(PROMPT, 400)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "cancel", _raise)
        loop.submit(first)
        loop.cancel(first.key)
        assert isinstance(collect.wait(first)[0].error, EngineFailure)
    second = ask(PROMPT, 3)
    loop.submit(second)
    assert collect.wait(second)[0].finish_reason is FinishReason.LENGTH


def test_a_cancelled_request_ends_at_once_while_a_batch_fills_up() -> None:
    engine, collect = load(checkpoint("llama"), mode="dynamic", max_queue_delay_ms=60_000), Collector()
    loop, request = EngineLoop(engine, collect, 10), ask(PROMPT, 3)
    loop.submit(request)
    time.sleep(0.1)  # the loop has begun to wait for the batch
    loop.cancel(request.key)
    assert collect.wait(request)[0].finish_reason is FinishReason.CANCELLED
    loop.close()


def test_a_fault_of_whoever_takes_outputs_does_not_end_the_thread(engine: Engine) -> None:
    collect, poisoned = Collector(), ask(PROMPT, 2)

    def deliver(output: Output) -> None:
        if output.key == poisoned.key:
            _raise()
        collect(output)

    loop = EngineLoop(engine, deliver, 10)
    good = ask(PROMPT, 5)
    loop.submit(poisoned)
    loop.submit(good)
    assert collect.wait(good)[0].finish_reason is FinishReason.LENGTH
    loop.close()


def test_the_bound_holds_while_the_engine_takes_requests(
    engine: Engine, make_loop: Callable[..., tuple[EngineLoop, Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that have left the inbox and have not reached the engine's queue wait all the same."""
    loop, collect = make_loop(max_queue_size=3)
    entered, gate, submit, step = threading.Event(), threading.Event(), engine.submit, engine.step

    def slow(request: Request) -> None:
        entered.set()
        time.sleep(0.2)
        submit(request)

    monkeypatch.setattr(engine, "submit", slow)
    monkeypatch.setattr(engine, "step", lambda: step() if gate.wait(60) else [])
    taken = [ask(PROMPT, 2)]
    loop.submit(taken[0])
    assert entered.wait(30)
    taken += [ask(PROMPT, 2), ask(PROMPT, 2)]
    for request in taken[1:]:
        loop.submit(request)
    with pytest.raises(QueueFull, match="Maximum queue size of 3"):
        loop.submit(ask(PROMPT, 2))
    gate.set()
    collect.wait(*taken)


def test_closing_ends_all_that_runs_waits_or_has_just_come(
    engine: Engine, make_loop: Callable[..., tuple[EngineLoop, Collector]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, collect = make_loop(max_queue_size=100)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())  # else some may have ended before
    requests = [ask(PROMPT, 400) for _ in range(40)]
    for request in requests[:36]:
        loop.submit(request)
    time.sleep(0.05)
    for request in requests[36:]:
        loop.submit(request)
    loop.close()
    assert all(isinstance(output.error, ShuttingDown) for output in collect.wait(*requests))
    with pytest.raises(ShuttingDown):
        loop.submit(ask(PROMPT))


def test_what_raises_again_while_all_requests_fail_leaves_none_open(
    make_loop: Callable[..., tuple[EngineLoop, Collector]], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code that ends a request may be what failed: every request still gets an end, and the next one is served."""
    loop, collect = make_loop()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", _raise)
        patch.setattr(engine._scheduler, "remove", _raise)
        first, second = ask(PROMPT, 4), ask(PROMPT, 4)
        loop.submit(first, second)
        assert all(isinstance(output.error, EngineFailure) for output in collect.wait(first, second))
    assert engine._state.active == 0
    after = ask(PROMPT, 4)
    loop.submit(after)
    assert collect.wait(after)[0].finish_reason is FinishReason.LENGTH
