"""The engine on the fake when something goes wrong: one request's fault is its own, and a dead engine says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inflight.clock import now_ns
from inflight.engine.request import FinishReason, Output
from inflight.errors import EngineFailure, InvalidRequest
from inflight.sampling import Guide
from inflight.trtllm import runtime, watchdog
from inflight.trtllm.engine import TrtLlmEngine
from tests.trtllm.support.driving import ask, deployment, run

Start = Callable[..., TrtLlmEngine]
SetFault = Callable[..., None]


def _steps(engine: TrtLlmEngine, seconds: float) -> None:
    end = time.monotonic() + seconds
    while engine.busy and time.monotonic() < end:
        engine.step()


def _until(holds: Callable[[], bool], work: Callable[[], object]) -> None:
    """Do ``work`` until something holds, however long that takes on a slow machine, within reason."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        work()


def _by_hand(engine: TrtLlmEngine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the watchdog's time pass only where a test says so, however long the machine stands still; return it."""
    now = [0.0]
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine._watchdog.progress()
    return now


def test_a_hang_fails_what_runs_and_refuses_what_comes(
    start: Start, prompt: list[int], set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: list[float] = []
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.4}), lambda: hung.append(time.monotonic()))
    now = _by_hand(engine, monkeypatch)
    set_fault(stall_after=5)
    outputs = [Output(0), Output(0)]
    requests = [ask(prompt), ask(prompt)]
    for request in requests:
        engine.submit(request)

    def step() -> None:
        for output in engine.step():
            outputs[[request.key for request in requests].index(output.key)].extend(output)

    _until(lambda: all(len(output.tokens) == 5 for output in outputs), step)
    now[0] += 0.35
    step()
    assert not any(output.finished for output in outputs)
    bitten = time.monotonic()

    def later() -> None:
        now[0] += 0.1
        step()

    # The steps that it had computed before may have been seen late, which was progress.
    _until(lambda: all(output.finished for output in outputs), later)
    for output in outputs:
        assert len(output.tokens) == 5
        assert isinstance(output.error, EngineFailure)
        assert "no progress for 0.4 s" in str(output.error)
    with pytest.raises(EngineFailure, match="must be started again"):
        engine.validate(ask(prompt))
    _until(lambda: bool(hung), lambda: time.sleep(0.01))
    assert hung[0] - bitten >= watchdog.GRACE_S, "the errors get time to reach their clients"
    assert len(hung) == 1


def test_what_was_valid_before_a_hang_ends_too(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.2}))
    set_fault(stall_after=2)
    late = ask(prompt)
    engine.validate(late)
    run(engine, ask(prompt))
    engine.submit(late)
    [output] = engine.step()
    assert output.key == late.key
    assert isinstance(output.error, EngineFailure)
    assert not engine.busy


def test_cancels_do_not_hide_a_hang(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    """Clients that give up sooner than the watchdog does, one after the other."""
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.5}))
    set_fault(hang=True)

    def ask_and_leave() -> None:
        request = ask(prompt, max_tokens=3)
        engine.submit(request)
        _steps(engine, 0.2)
        engine.cancel(request.key)

    _until(lambda: engine._watchdog.dead, ask_and_leave)
    with pytest.raises(EngineFailure, match="no progress for 0.5 s"):
        engine.validate(ask(prompt))
    engine.step()
    assert not engine.busy, "a dead engine is not stepped for nothing"


def test_a_burst_of_cancels_is_no_hang(
    start: Start, prompt: list[int], set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the batch is asked and cancelled at once: what TensorRT-LLM has not begun it drops without a word."""
    monkeypatch.setattr(runtime, "_ABORT_GRACE_S", 3600)
    engine = start(deployment(batching={"max_batch_size": 2}, tensorrt_llm={"watchdog_s": 0.3}))
    now = _by_hand(engine, monkeypatch)
    set_fault(hang=True)  # so that no request begins in between
    requests = [ask(prompt) for _ in range(4)]
    for request in requests:
        engine.submit(request)
    outputs = engine.step()
    assert engine._runtime.open == 2
    begun = list(engine._running)
    for request in requests:
        engine.cancel(request.key)
    now[0] += 1
    outputs += engine.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED] * 4
    engine.submit(ask(prompt))
    _steps(engine, 0.1)
    assert engine._running == {}, "as long as TensorRT-LLM may still have the others, it gets no more"
    set_fault()
    for key in begun:
        engine._runtime._loop.call_soon_threadsafe(engine._runtime._give_up, key)
    while engine._runtime.open:  # the watchdog's time begins anew with the first request beside no other
        time.sleep(0.01)
    ends = []
    while engine.busy:
        ends += [output.finish_reason for output in engine.step() if output.finished]
    assert ends == [FinishReason.LENGTH]
    assert not engine._watchdog.dead


def test_a_lost_abort_does_not_end_an_idle_engine(
    start: Start, prompt: list[int], set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_ABORT_GRACE_S", 0.5)
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.2}))
    now = _by_hand(engine, monkeypatch)
    set_fault(hang=True)
    request = ask(prompt)
    engine.submit(request)
    engine.step()
    engine.cancel(request.key)
    now[0] += 1
    engine.step()
    set_fault()
    _steps(engine, 30)
    assert not engine.busy
    engine.validate(ask(prompt))


def test_errors_do_not_hide_a_hang(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.5}))
    set_fault(stall_after=2)
    engine.submit(ask(prompt, max_tokens=3))

    def fail() -> None:
        wrong = ask(prompt)
        wrong.lora = "none"  # not validated: its arguments cannot be made
        engine.submit(wrong)
        _steps(engine, 0.2)

    _until(lambda: engine._watchdog.dead, fail)
    with pytest.raises(EngineFailure, match="no progress for 0.5 s"):
        engine.validate(ask(prompt))


def test_idle_time_is_no_hang(start: Start, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.2}))
    now = _by_hand(engine, monkeypatch)
    now[0] += 0.3
    [output] = run(engine, ask(prompt))
    assert output.finish_reason is FinishReason.LENGTH


def test_iterations_without_responses_are_progress(
    start: Start, prompt: list[int], set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(deployment(tensorrt_llm={"watchdog_s": 0.3}))
    now = _by_hand(engine, monkeypatch)
    set_fault(stall_after=2, step_delay_s=0.01)
    engine.submit(ask(prompt, max_tokens=1000, ignore_eos=True))
    for _ in range(10):
        seen = engine._iteration
        while engine.busy and engine._iteration == seen:
            engine.step()
        now[0] += 0.2
    assert engine.busy
    engine.validate(ask(prompt))


def test_statistics_go_on_after_a_slow_iteration(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment())
    before = engine._runtime._llm.iteration["iter"]
    set_fault(step_delay_s=0.6)
    run(engine, ask(prompt, max_tokens=3))
    end = time.monotonic() + 30
    while engine._runtime.iteration.get("iter", 0) < before + 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert engine._runtime.iteration.get("iter", 0) >= before + 2


@pytest.mark.proof
@pytest.mark.parametrize("fault", [{"error_after": 3}, {"end_after": 3}, {"assert_after": 3}])
def test_a_fault_of_one_request_is_its_own(
    start: Start, prompt: list[int], set_fault: SetFault, caplog: pytest.LogCaptureFixture, fault: dict[str, Any]
) -> None:
    died = threading.Event()
    engine = start(deployment(), died.set)
    set_fault(**fault)
    short, long = run(engine, ask(prompt, max_tokens=2), ask(prompt, max_tokens=9, log_probs=True))
    assert short.finish_reason is FinishReason.LENGTH
    assert isinstance(long.error, EngineFailure)
    assert len(long.tokens) in (2, 3)
    assert "kernel.cu" not in str(long.error), "details are for the log"
    assert f"request {long.key} failed in TensorRT-LLM" in caplog.text
    assert _running(engine) == 0
    set_fault()
    [output] = run(engine, ask(prompt))
    assert output.finish_reason is FinishReason.LENGTH
    assert not died.is_set()


def test_what_is_refused_late_is_the_requests_own_fault(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment(tensorrt_llm={"guided_decoding": "xgrammar"}))
    [output] = run(engine, ask(prompt, guide=Guide("regex", "(")))
    assert isinstance(output.error, InvalidRequest)
    assert "TensorRT-LLM refuses the request: missing ), unterminated subpattern" in str(output.error)
    set_fault(refuse="Token ID out of range")
    [output] = run(engine, ask(prompt))
    assert isinstance(output.error, InvalidRequest)
    assert str(output.error) == "TensorRT-LLM refuses the request: Token ID out of range"
    assert engine.stats.prompt_tokens == 0


def test_many_bad_requests_are_no_death(start: Start, prompt: list[int]) -> None:
    """After some of them TensorRT-LLM is asked for a token, and gives it."""
    engine = start(deployment(tensorrt_llm={"guided_decoding": "xgrammar"}))
    outputs = run(engine, *(ask(prompt, guide=Guide("regex", "(")) for _ in range(20)))
    assert {type(output.error) for output in outputs} == {InvalidRequest}
    assert not engine._watchdog.dead
    assert engine.stats.generated_tokens == 0, "the token was nobody's"


def test_a_hang_after_bad_requests_is_seen_though_nobody_waits(
    start: Start, prompt: list[int], set_fault: SetFault
) -> None:
    """After so many of them TensorRT-LLM is asked for a token, and never gives it."""
    engine = start(deployment(tensorrt_llm={"guided_decoding": "xgrammar", "watchdog_s": 0.5}))
    set_fault(hang=True)
    for _ in range(8):
        engine.submit(ask(prompt, guide=Guide("regex", "(")))
    _steps(engine, 30)
    with pytest.raises(EngineFailure, match="no progress for 0.5 s"):
        engine.validate(ask(prompt))


def test_steps_that_go_on_failing_are_a_death(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    """Each step fails whatever runs, and TensorRT-LLM does not shut down."""
    died = threading.Event()
    engine = start(deployment(), died.set)
    set_fault(step_error="CUDA error: device-side assert triggered at /src/kernel.cu:12")
    outputs = run(engine, *(ask(prompt) for _ in range(8)))
    assert {type(output.error) for output in outputs} == {EngineFailure}
    assert not any("kernel.cu" in str(output.error) for output in outputs)
    assert died.wait(30)
    with pytest.raises(EngineFailure, match="fails every request .*must be started again"):
        engine.validate(ask(prompt))


def test_logits_of_another_token_fail_the_request(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment())
    [right] = run(engine, ask(prompt, generation_logits=True))
    assert right.error is None
    set_fault(shifted_logits=True)
    plain, wrong = run(engine, ask(prompt), ask(prompt, generation_logits=True))
    assert plain.error is None
    assert isinstance(wrong.error, EngineFailure)


def test_a_response_that_cannot_be_booked_ends_its_own_request(
    start: Start, prompt: list[int], set_fault: SetFault, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(deployment())
    set_fault(no_log_probs=True)
    plain, scored = run(engine, ask(prompt), ask(prompt, log_probs=True))
    assert plain.finish_reason is FinishReason.LENGTH
    assert isinstance(scored.error, EngineFailure)
    assert f"request {scored.key} could not be read" in caplog.text
    assert _running(engine) == 0


def test_an_engine_that_has_died_fails_all_and_ends_the_server(
    start: Start, prompt: list[int], set_fault: SetFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.05)
    died = threading.Event()
    engine = start(deployment(), died.set)
    set_fault(die_after=3)
    for output in run(engine, *(ask(prompt, max_tokens=60) for _ in range(3))):
        assert isinstance(output.error, EngineFailure)
        assert "rank 0" not in str(output.error)
    assert died.wait(30)
    with pytest.raises(EngineFailure, match="has failed .*must be started again"):
        engine.validate(ask(prompt))


def test_a_death_between_requests_is_seen_by_the_next(start: Start, prompt: list[int]) -> None:
    engine = start(deployment())
    engine._runtime._llm.die()
    [output] = run(engine, ask(prompt))
    assert isinstance(output.error, EngineFailure)
    with pytest.raises(EngineFailure, match="must be started again"):
        engine.validate(ask(prompt))


def _running(engine: TrtLlmEngine) -> int:
    """Return how many generations TensorRT-LLM runs, soon after now."""
    _until(lambda: not engine._runtime._llm.running, lambda: time.sleep(0.01))
    return int(engine._runtime._llm.running)


@pytest.mark.parametrize("how", ["cancel", "deadline", "stop"])
def test_what_ends_here_ends_in_tensorrt_llm(start: Start, prompt: list[int], set_fault: SetFault, how: str) -> None:
    engine = start(deployment())
    [output] = run(engine, ask(prompt, max_tokens=8, ignore_eos=True))
    set_fault(step_delay_s=0.1)  # the whole would take minutes
    request = ask(
        prompt, max_tokens=1900, ignore_eos=True, stop_sequences=(tuple(output.tokens[2:5]),) if how == "stop" else ()
    )
    request.deadline_ns = now_ns() + 300_000_000 if how == "deadline" else None
    engine.submit(request)
    if how == "cancel":
        _until(lambda: engine._runtime._llm.running == 1, engine.step)
        engine.cancel(request.key)
    _steps(engine, 30)
    assert not engine.busy
    assert _running(engine) == 0


def test_what_an_abort_does_not_end_is_still_shown(start: Start, prompt: list[int], set_fault: SetFault) -> None:
    engine = start(deployment())
    set_fault(ignore_aborts=True, step_delay_s=0.02)
    request = ask(prompt, max_tokens=300, ignore_eos=True)
    engine.submit(request)
    _until(lambda: engine.stats.state().step.sequences == 1, engine.step)
    engine.cancel(request.key)
    engine.step()
    assert engine.stats.state().active == 0
    assert engine.stats.state().kv_blocks_used > 0
    assert engine.stats.state().step.sequences == 1
