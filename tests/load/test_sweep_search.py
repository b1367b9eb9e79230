"""The search of a sweep on servers of known capacity: exact, with noise, and in trouble. No server, no clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from inflight.load.arrivals import Phase, arrival_times
from inflight.load.measurements import Arrival, Distribution, RequestRecord, measure
from inflight.load.overhead import ClientHealth
from inflight.load.result import LoadResult
from inflight.load.sweep.report import finding_lines
from inflight.load.sweep.run import StepLength
from inflight.load.sweep.search import Findings, Search, SweepPlan, find
from inflight.load.sweep.step import Level, Step, in_flight, wilson
from tests.load.support.scenarios import scenario
from tests.support.tables import each_row

SERVICE_S, WINDOW_S = 0.5, 20.0
NOTHING = measure([], (0.0, WINDOW_S), {})
Model = Callable[[float, int], Step]


def step(
    load: float, offered: float, answered: float, e2e_s: float, good: float = 1.0, reasons: tuple[str, ...] = ()
) -> Step:
    """A step with these figures; ``good`` is the share of the requests within the limits."""
    judged = round(offered * WINDOW_S)
    e2e = Distribution(judged, *[1000 * e2e_s] * 6)
    figures = replace(NOTHING, e2e_ms=e2e, goodput=good * offered, output_tokens_per_second=20 * answered)
    begin = round(load * SERVICE_S)
    end = max(0, begin + round((offered - answered) * WINDOW_S))
    return Step(load, 0, figures, offered, answered, (begin, end), round(good * judged), judged, 0, 0, judged, reasons)


def open_server(capacity: float, noise: float = 0.0, seed: int = 0, usable: float | None = None) -> Model:
    """A server that answers up to ``capacity`` requests per second, and keeps its limits up to ``usable``."""
    generator = np.random.default_rng(seed)

    def run(load: float, _repeat: int) -> Step:
        offered = load * (1 + noise * generator.standard_normal())
        answered = min(offered, capacity) * (1 + noise * generator.standard_normal() / 2)
        return step(load, offered, answered, SERVICE_S, good=float(load <= (usable or capacity)))

    return run


def closed_server(places: int, noise: float = 0.0, seed: int = 0, usable: int | None = None) -> Model:
    """A server with so many places, each of which takes ``SERVICE_S`` for a request."""
    generator = np.random.default_rng(seed)

    def run(load: float, _repeat: int) -> Step:
        rate = min(load, places) / SERVICE_S * (1 + noise * generator.standard_normal())
        return step(load, rate, rate, load / rate, good=float(load <= (usable or places)))

    return run


def sweep(model: Model, **settings: float | bool | None) -> tuple[Findings, Search]:
    values: dict[str, float | bool | None] = {"open": True, "low": 1.0, "high": 4096.0} | settings
    plan = SweepPlan(**values)  # type: ignore[arg-type]
    search = Search(plan, model)
    search.run()
    return find(plan, search.levels), search


@each_row("capacity", [3.3, 16.0, 47.0, 1000.0])
def test_the_knee_of_an_open_loop_is_its_capacity(capacity: float) -> None:
    found, _ = sweep(open_server(capacity))
    assert found.knee is not None
    assert found.knee.load == pytest.approx(capacity)
    assert found.knee.requests_per_second == pytest.approx(capacity)
    assert found.knee.output_tokens_per_second == pytest.approx(20 * capacity)
    assert found.knee.below is not None
    assert found.knee.above is not None
    # A shortfall of 5 % is allowed, and so much again is what the queue of a short step cannot tell from chance.
    assert found.knee.below <= capacity < found.knee.above
    assert found.knee.above <= 1.2 * capacity


@each_row("places", [1, 2, 3, 5, 6, 7, 8, 13, 20, 100])
def test_the_knee_of_a_closed_loop_is_its_number_of_places(places: int) -> None:
    found, _ = sweep(closed_server(places), open=False)
    assert found.knee is not None
    assert found.knee.load == pytest.approx(places, rel=0.05)
    assert found.knee.requests_per_second == pytest.approx(places / SERVICE_S, rel=0.05)


@each_row("seed", range(20))
def test_noise_moves_a_knee_by_less_than_a_tenth(seed: int) -> None:
    opened, _ = sweep(open_server(30, noise=0.03, seed=seed))
    closed, _ = sweep(closed_server(24, noise=0.03, seed=seed), open=False)
    assert opened.knee is not None
    assert closed.knee is not None
    assert opened.knee.requests_per_second == pytest.approx(30, rel=0.1)
    assert opened.knee.load == pytest.approx(30, rel=0.1)
    assert (opened.knee.below or 0) <= opened.knee.load <= (opened.knee.above or 0)
    assert closed.knee.requests_per_second == pytest.approx(48, rel=0.1)
    assert closed.knee.load == pytest.approx(24, rel=0.15)


def poisson_server(places: int | None, request_s: float, seed: int) -> Model:
    """A server with so many places, each of which takes ``request_s`` for a request, and Poisson arrivals; None: as
    many places as are asked for."""
    length = StepLength(WINDOW_S, request_s)

    def run(load: float, repeat: int) -> Step:
        begin = length.warm_up_s(length.window_s(load, True))
        window = (begin, begin + length.window_s(load, True))
        phases = [Phase(duration_s=window[1], rate=load)]
        free, records = [0.0] * (places or 1), []
        for number, at in enumerate(arrival_times(phases, np.random.default_rng([seed, repeat]))):
            end = at + request_s if places is None else max(at, heapq.heappop(free)) + request_s
            heapq.heappush(free, end)
            records.append(RequestRecord(number, 0, "x", at, end, "completed", scheduled_s=at))
        health = ClientHealth(None, None, None, False, ())
        result = LoadResult(
            scenario=scenario(),
            seed=seed,
            transport="grpc",
            command="",
            records=records,
            window=window,
            load_ended_s=window[1],
            interrupted=False,
            client=health,
        )
        return Step.of(load, result)

    return run


@pytest.mark.proof
@each_row("request_s", [2.0, 10.0, 15.0])
def test_a_server_that_keeps_up_with_everything_has_no_knee(request_s: float) -> None:
    """By chance alone, what is in flight at a window's two ends differs by more than the limit."""
    found = [sweep(poisson_server(None, request_s, seed), high=16.0)[0] for seed in range(15)]
    assert [one.knee for one in found] == [None] * 15


@pytest.mark.proof
@each_row(("places", "request_s"), [(8, 1.0), (16, 0.5)])
def test_the_knee_for_poisson_arrivals_is_the_capacity(places: int, request_s: float) -> None:
    for seed in range(8):
        found, _ = sweep(poisson_server(places, request_s, seed))
        assert found.knee is not None
        assert found.knee.load == pytest.approx(places / request_s, rel=0.1)
        assert found.knee.requests_per_second == pytest.approx(places / request_s, rel=0.1)
        assert (found.knee.below or 0) <= found.knee.load <= (found.knee.above or 0) <= 1.5 * places / request_s


@each_row("factor", [1.05, 1.1, 1.5, 2.0])
def test_small_steps_up_do_not_end_a_closed_loop_before_its_knee(factor: float) -> None:
    for seed in range(5):
        found, _ = sweep(closed_server(64, noise=0.01, seed=seed), open=False, factor=factor, high=256.0)
        assert found.knee is not None
        assert found.knee.load == pytest.approx(64, rel=0.1)


@each_row("usable", [1.0, 2.7, 11.0, 15.5])
def test_the_highest_load_within_the_limits_is_closed_in_on(usable: float) -> None:
    found, _ = sweep(open_server(16, usable=usable), share=0.95)
    assert found.usable is not None
    assert found.usable.broken_at is not None
    assert found.usable.load <= usable < found.usable.broken_at <= 1.05 * found.usable.load
    assert found.usable.goodput == pytest.approx(found.usable.load)


def test_a_closed_loop_goes_on_past_its_knee_until_the_limits_break() -> None:
    found, _ = sweep(closed_server(8, usable=50), open=False, share=0.95)
    assert found.knee is not None
    assert found.usable is not None
    assert found.knee.load == 8
    assert found.usable.load in (49, 50)


def test_a_load_that_is_not_kept_up_with_does_not_keep_the_limits() -> None:
    found, _ = sweep(open_server(16, usable=1000), share=0.95)
    assert found.usable is not None
    assert found.usable.load <= 16 / 0.95


def test_a_load_near_the_border_is_measured_again_and_its_runs_count_as_one() -> None:
    shares = {0: 0.93, 1: 0.97, 2: 0.98}  # 0.96 together

    def run(load: float, repeat: int) -> Step:
        good = 1.0 if load < 8 else shares[repeat] if load == 8 else 0.0
        return step(load, load, load, SERVICE_S, good)

    found, search = sweep(run, share=0.95, high=16.0, tolerance=1.0)
    assert [len(level.tried) for level in search.levels] == [1, 1, 1, 3, 1]
    assert found.usable is not None
    assert found.usable.load == 8
    assert found.usable.attainment == pytest.approx(0.96, abs=0.005)


def test_a_step_whose_client_was_too_slow_is_no_answer() -> None:
    def run(load: float, _repeat: int) -> Step:
        return step(load, load, load, SERVICE_S, reasons=("the client used 99% of a core",) if load > 10 else ())

    found, search = sweep(run, share=0.95)
    assert found.knee is None
    assert found.usable is not None
    assert 9.5 < found.usable.load <= 10
    assert found.usable.broken_at is None, "the server broke nothing"
    assert any("The client was the bottleneck" in note for note in found.notes)
    assert max(level.load for level in search.levels) == 16, "nothing is measured above it"


def test_a_clients_single_hiccup_is_measured_again_and_left_out() -> None:
    def run(load: float, repeat: int) -> Step:
        hiccup = load == 4 and repeat == 0
        return step(load, load, min(load, 12) / (4 if hiccup else 1), SERVICE_S, reasons=("lag",) if hiccup else ())

    found, search = sweep(run)
    assert found.knee is not None
    assert found.knee.requests_per_second == pytest.approx(12)
    [level] = [level for level in search.levels if level.load == 4]
    assert (len(level.tried), len(level.steps), level.client_bound) == (2, 1, False)


def test_what_was_not_found_is_said() -> None:
    within, search = sweep(open_server(1000), high=8.0, share=0.95)
    assert within.knee is None
    assert [level.load for level in search.levels] == [1, 2, 4, 8]
    assert finding_lines(search.plan, search.levels, "TTFT at most 9 ms")[1:] == [
        "No knee: the highest load that was measured did not saturate the server.",
        "The limits held at every load that was measured: the highest may be higher.",
    ]
    below, _ = sweep(open_server(50, usable=0.5), share=0.95)
    assert below.usable is None
    assert below.notes == ("Even the lowest load that was measured did not keep the limits.",)


def test_an_interrupted_search_keeps_what_was_measured() -> None:
    calls = []

    def run(load: float, repeat: int) -> Step:
        calls.append(load)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return open_server(3)(load, repeat)

    search = Search(SweepPlan(True, 1.0, 64.0), run)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    found = find(search.plan, search.levels)
    assert found.knee is not None
    assert (found.knee.below, found.knee.above) == (2, 4)


def test_levels_judge_by_hand_made_numbers() -> None:
    level = Level(10, (step(10, 10, 9, 2.0, good=0.9), step(10, 12, 12, 1.0, good=1.0)))
    assert level.offered == 11
    assert level.answered == 10.5
    assert level.shortfall == pytest.approx(0.5 / 11)
    assert level.keeps_up
    assert level.keeping_up_is_unsure
    # 420 requests came; 5 and 25 were in flight at one step's ends, 5 and 5 at the other's.
    half = 2.576 * 40**0.5 / 440
    assert level.shortfall_interval == pytest.approx((0.5 / 11 - half, 0.5 / 11 + half))
    assert level.queue_growth == pytest.approx(0.5)
    assert level.mean_e2e_s == pytest.approx(1.5)
    assert level.power == pytest.approx(7.0)
    assert level.attainment == pytest.approx((180 + 240) / 440)


def test_wilsons_interval() -> None:
    # E. B. Wilson's formula by hand: 8 of 10.
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.490, abs=5e-4), pytest.approx(0.943, abs=5e-4))
    assert wilson(0, 0) == (0.0, 1.0)


def test_requests_in_flight() -> None:
    def record(sent: float, ended: float) -> RequestRecord:
        return RequestRecord(0, 0, "x", sent, ended, "completed", arrivals=(Arrival(ended, 1),))

    records = [record(0, 2), record(1, 3), record(2, 4)]
    assert [in_flight(records, at) for at in (0, 1.5, 2.5, 3.5, 5)] == [0, 2, 2, 1, 0]
