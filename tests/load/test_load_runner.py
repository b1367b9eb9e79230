"""The runner against a scripted server: what it measures, and how it counts what goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from typing import Any

import pytest

from inflight.client import GenerateOptions
from inflight.load.measurements import Figures, measure
from inflight.load.overhead import LoopWatch
from inflight.load.runner import Runner, client_for
from inflight.load.workload import Session
from tests.load.support.scenarios import fixed, request_class, workload
from tests.support.fake_server import PIECES, FakeServer, Faults


def _run(faults: Faults, kind: dict[str, Any] | None = None, http: bool = False, **scenario: Any) -> Runner:
    async def drive(fake: FakeServer) -> Runner:
        async with client_for(f"127.0.0.1:{fake.http_port if http else fake.grpc_port}", http) as client:
            await client.wait_ready(10)  # the first connection is no part of what is measured
            runner = Runner(workload(kind or request_class(), **scenario), client)
            await runner.run()
            return runner

    with FakeServer(faults=faults) as fake:
        runner = asyncio.run(drive(fake))
        assert fake.most_running <= 32
    assert runner.records
    return runner


def _figures(runner: Runner) -> Figures:
    return measure(runner.records, (0.0, 100.0), {})


def _most_at_once(runner: Runner) -> int:
    starts, ends = [(one.sent_s, 1) for one in runner.records], [(one.ended_s, -1) for one in runner.records]
    return max(itertools.accumulate(change for _, change in sorted(starts + ends)))


@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
def test_what_is_measured(http: bool) -> None:
    runner = _run(Faults(first_delay=0.08, delay=0.03), http=http)
    records = runner.records
    assert {one.outcome for one in records} == {"completed"}
    assert {(one.input_tokens, one.output_tokens, len(one.arrivals)) for one in records} == {(7, 5, len(PIECES))}
    assert {arrival.tokens for one in records for arrival in one.arrivals} == {1}
    assert all(one.ttft_s is not None and one.ttft_s >= 0.08 for one in records)
    figures = _figures(runner)
    assert figures.ttft_ms is not None
    assert figures.itl_ms is not None
    # Only bounds that a machine which stands still for a while cannot break: it adds to what the server takes.
    assert all(one.e2e_s >= 0.2 for one in records)
    assert min(one.ttft_s or 0 for one in records) < 5
    assert all(one.arrivals[-1].time_s - one.start_s <= one.e2e_s for one in records)
    assert figures.ttft_ms.p50 == pytest.approx(statistics.median(1000 * (one.ttft_s or 0) for one in records))
    assert figures.itl_ms.p50 == pytest.approx(figures.gap_ms.p50 if figures.gap_ms else 0), "one token in each"
    assert runner.ended == {"completed": len(records)}
    assert runner.tokens == 5 * len(records)
    assert runner.running == 0


@pytest.mark.proof
def test_a_closed_loop_keeps_its_concurrency() -> None:
    runner = _run(Faults(first_delay=0.05), phases=[{"duration_s": 2.5, "concurrency": 4}])
    assert _most_at_once(runner) == 4
    begun, ended = sorted(one.sent_s for one in runner.records), sorted(one.ended_s for one in runner.records)
    empty = [start - end for start, end in zip(begun[4:], ended, strict=False)]
    lasted = statistics.median(one.e2e_s for one in runner.records)
    assert statistics.median(empty) < lasted, "a slot is hardly ever empty"
    assert all(one.scheduled_s is None for one in runner.records)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    phases = [{"duration_s": 1, "rate": 20, "arrivals": "constant"}]
    runner = _run(Faults(first_delay=0.5), phases=phases)
    scheduled = sorted(one.scheduled_s or 0 for one in runner.records)
    assert scheduled == pytest.approx([(number + 0.5) / 20 for number in range(20)])
    late = max(lag_s for _, lag_s, _ in runner.watch.samples)  # of a timer, beside it: what the machine took
    assert statistics.median(one.sent_s - (one.scheduled_s or 0) for one in runner.records) < 0.05 + late
    assert _most_at_once(runner) >= 5
    assert all((one.ttft_s or 0) >= 0.5 for one in runner.records)
    assert {one.outcome for one in runner.records} == {"completed"}


@pytest.mark.parametrize(
    ("faults", "outcome", "error"),
    [
        (Faults(refuse=10**6), "refused", "queue_full"),
        (Faults(error="INTERNAL: broken"), "failed", "internal"),
        (Faults(error="INTERNAL: broken", after=2), "failed", "internal"),
        (Faults(error="INVALID_ARGUMENT: too long"), "failed", "invalid"),
        (Faults(hangup=True, after=1), "failed", "unreachable"),
        (Faults(truncate=True, after=3), "failed", "internal"),
    ],
    ids=str,
)
def test_errors_are_counted_by_kind(faults: Faults, outcome: str, error: str) -> None:
    figures = _figures(_run(faults, phases=[{"duration_s": 0.4, "concurrency": 2}]))
    assert figures.outcomes == {outcome: figures.requests}
    assert figures.errors == {error: figures.requests}
    assert 0 < figures.requests < 20, "slots pause after an error"
    assert figures.ttft_ms is None
    assert figures.e2e_ms is None


def test_some_are_refused_and_the_others_served() -> None:
    runner = _run(Faults(refuse=3), phases=[{"duration_s": 1, "rate": 20, "arrivals": "constant"}])
    assert _figures(runner).outcomes == {"refused": 3, "completed": 17}


@pytest.mark.sweep
@pytest.mark.parametrize("http", [False, True], ids=["grpc", "http"])
@pytest.mark.parametrize("after", [{"after_tokens": fixed(2)}, {"after_ms": fixed(60)}], ids=str)
def test_cancellations(after: dict[str, Any], http: bool) -> None:
    kind = request_class(cancellations={"share": 1.0, **after})
    runner = _run(Faults(delay=0.2), kind, http=http, phases=[{"duration_s": 2, "concurrency": 2}])
    assert {one.outcome for one in runner.records} == {"cancelled"}
    if "after_tokens" in after:
        assert statistics.median(one.output_tokens for one in runner.records) == 2
    else:  # on a busy machine not even the first token has come by then
        assert all(one.ended_s - one.sent_s >= 0.055 for one in runner.records)
        assert statistics.median(one.output_tokens for one in runner.records) <= 1


def test_what_does_not_end_in_time_is_unfinished() -> None:
    runner = _run(Faults(first_delay=2, delay=2), phases=[{"duration_s": 0.3, "concurrency": 2}], drain_s=0.1)
    assert {one.outcome for one in runner.records} == {"unfinished"}, "an answer takes 10 s"
    assert all(0.3 < one.ended_s < 10 for one in runner.records)
    assert not runner.interrupted


def test_a_conversation_goes_on_with_the_servers_answer() -> None:
    kind = request_class(format="messages", turns={"count": fixed(2), "think_ms": fixed(50)})

    async def drive(fake: FakeServer) -> Runner:
        async with client_for(f"127.0.0.1:{fake.grpc_port}", False) as client:
            runner = Runner(workload(kind, phases=[{"duration_s": 60, "rate": 4, "arrivals": "constant"}]), client)
            running = asyncio.create_task(runner.run())
            while [(one.session, one.turn) for one in runner.records].count((0, 1)) == 0:
                await asyncio.sleep(0.01)
            runner.stop()
            await running
            return runner

    with FakeServer() as fake:
        runner = asyncio.run(drive(fake))
        sent = [json.loads(request["messages"]) for request in fake.requests]
    assert next(messages for messages in sent if len(messages) == 3)[1]["content"] == "".join(PIECES)
    first, second = (one for one in runner.records if one.session == 0)
    assert (first.turn, second.turn) == (0, 1)
    assert second.scheduled_s is not None
    assert first.ended_s + 0.05 <= second.scheduled_s <= second.sent_s


def test_a_busy_client_says_so() -> None:
    async def drive() -> LoopWatch:
        began = time.perf_counter()
        watch = LoopWatch(lambda: time.perf_counter() - began)
        task = asyncio.create_task(watch.watch())
        for _ in range(6):
            until = time.process_time() + 0.08
            while time.process_time() < until:  # holds the event loop, and the core
                pass
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        task.cancel()
        return watch

    health = asyncio.run(drive()).health((0.0, 100.0), None)
    assert health.bottleneck
    assert health.loop_lag_ms is not None
    assert health.loop_lag_ms.p99 > 40
    assert any("event loop lag" in reason for reason in health.reasons)


@pytest.mark.parametrize(("stands_s", "samples"), [(1.0, 50), (0.03, 2)])
def test_timers_that_a_stopped_loop_did_not_set_count_too(stands_s: float, samples: int) -> None:
    """A second is one late timer, and 49 that could not come; without these it is 1 % of 2 s."""
    watch = LoopWatch(time.monotonic, [(number / 50, 0.0, 0.0) for number in range(100)])
    watch.samples[50] = (1.0, stands_s, 0.0)
    lag = watch.health((0.0, 2.0), None).loop_lag_ms
    assert lag is not None
    assert lag.count == 99 + samples
    assert lag.max == 1000 * stands_s
    assert (lag.p99 > 900) == (stands_s == 1.0)


def test_an_unforeseen_error_in_a_session_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Session.options

    def options(self: Session, turn: int) -> GenerateOptions:
        if self.number == 6:
            raise KeyError("nobody has\nthought of this")
        return real(self, turn)

    monkeypatch.setattr(Session, "options", options)
    runner = _run(Faults(), phases=[{"duration_s": 60, "concurrency": 2}])
    assert runner.fault == r"session 6 could not be run: KeyError: 'nobody has\nthought of this'"
    assert runner.interrupted
    assert runner.load_ended_s < 60
    assert runner.ended["completed"] >= 4
