"""In-flight, dynamic and static batching: who may join when; and that nobody's tokens depend on it."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.clock import now_ns
from inflight.engine.loop import EngineLoop
from inflight.engine.request import Output
from inflight.engine.sequence import Sequence
from tests.engine.support.books import POLICIES, SECOND, Books, Policy
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import Collector, ask, assert_idle, load

Mode = Literal["inflight", "dynamic", "static"]
MODES: list[Mode] = ["inflight", "dynamic", "static"]


def test_a_static_batch_is_what_waits_and_nobody_joins_it() -> None:
    books = Books(mode="static", max_batch_size=2, blocks=32)
    first, second, third = (books.add(4, max_tokens=length) for length in (2, 6, 2))
    books.step()
    late = books.add(4, max_tokens=2)
    while second not in books.ended:
        assert set(books.scheduler.running) <= {first, second}
        books.step()
    assert first in books.ended
    books.step()
    assert set(books.scheduler.running) == {third, late}


def test_a_batch_forms_whole_however_many_steps_its_prompts_take() -> None:
    books = Books(mode="static", max_tokens_per_step=5, blocks=32)
    members = {books.add(9, max_tokens=8) for _ in range(4)}
    assert len(books.step()) == 1
    assert set(books.scheduler.running) == members
    books.add(1)
    while not books.ended:
        assert set(books.scheduler.running) == members
        books.step()


def test_a_dynamic_batch_goes_when_it_is_full_or_its_oldest_has_waited() -> None:
    books = Books(mode="dynamic", max_queue_delay_ms=2500, max_batch_size=3, blocks=32)
    oldest = books.add(4, max_tokens=2)
    assert books.scheduler.due_in_s == pytest.approx(2.5)
    assert books.step() == []
    books.add(4, max_tokens=2)
    assert books.scheduler.due_in_s == pytest.approx(1.5), "the oldest one's time counts"
    assert [len(books.step()) for _ in range(3)] == [0, 0, 2]
    books.add(4, max_tokens=4)
    assert books.scheduler.due_in_s == 0, "while a batch runs, steps have something to do"
    while books.scheduler.running:
        books.step()
    assert oldest in books.ended
    for _ in range(2):
        books.add(4, max_tokens=2)
    assert len(books.step()) == 3, "it is full"


def test_a_deadline_passes_while_a_batch_fills_up() -> None:
    books = Books(mode="dynamic", max_queue_delay_ms=9000, max_batch_size=3, blocks=32)
    late, patient = books.add(4, deadline_ns=books.now_ns + 2 * SECOND), books.add(4)
    assert books.scheduler.due_in_s == pytest.approx(2)
    for _ in range(3):
        assert books.step() == []
    assert books.late == [late]
    assert list(books.scheduler._queue) == [patient]
    assert books.scheduler.due_in_s == pytest.approx(6)


@given(
    mode=st.sampled_from(["dynamic", "static"]),
    policy=st.sampled_from(POLICIES),
    batch=st.integers(1, 5),
    budget=st.integers(1, 16),
    arrivals=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2), st.integers(0, 4)), min_size=1, max_size=12
    ),
)
def test_nobody_joins_a_batch_and_everybody_gets_there(
    mode: Mode, policy: Policy, batch: int, budget: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    """The running set only grows from nothing; a batch that has formed was full, or had waited, or is all there is."""
    books = Books(policy, 10, mode=mode, max_batch_size=batch, max_tokens_per_step=budget, max_queue_delay_ms=3000)
    added: list[Sequence] = []

    def step() -> None:
        before = set(books.scheduler.running)
        oldest = min((one.request.arrival_ns for one in books.scheduler._queue), default=0)
        waiting, now = books.scheduler.num_waiting, books.now_ns
        formed = {chunk.sequence for chunk in books.step()} | set(books.scheduler.running)
        assert not before or formed <= before, "somebody has joined"
        if formed and not before and mode == "dynamic":
            assert waiting >= batch or now - oldest >= 3 * SECOND

    for length, max_tokens, priority, pause in arrivals:
        added.append(books.add(length, max_tokens, priority))
        for _ in range(pause):
            step()
    for _ in range(5000):
        if len(books.ended) == len(added):
            break
        step()
    assert sorted(one.order for one in books.ended) == [one.order for one in added]
    assert (books.cache.num_used_blocks, books.cache.num_reserved_blocks) == (0, 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_transformers_in_every_mode(mode: Mode, policy: Policy) -> None:
    engine = load(
        checkpoint("llama"),
        mode=mode,
        policy=policy,
        max_queue_delay_ms=1,
        max_batch_size=3,
        num_blocks=9,
        max_tokens_per_step=16,
        prefill_chunk_tokens=6,
    )
    prompts = [[3, 1, 4, 1, 5] * (1 + place % 4) + [place] for place in range(9)]
    requests = [ask(prompt, 4 + place) for place, prompt in enumerate(prompts)]
    outputs: list[Output] = []
    for request in requests:
        engine.submit(request)
        outputs += engine.step()
    while engine.busy:
        outputs += engine.step()
    assert_idle(engine)
    assert (engine.stats.preemptions > 0) == (policy == "max_utilization")
    for place, request in enumerate(requests):
        tokens = [token for output in outputs if output.key == request.key for token in output.tokens]
        assert tokens == greedy("llama", tuple(request.prompt), 4 + place)


def test_the_loop_wakes_up_for_a_batch_that_is_not_full() -> None:
    engine, collect = load(checkpoint("llama"), mode="dynamic", max_queue_delay_ms=50, max_batch_size=8), Collector()
    loop = EngineLoop(engine, collect, max_queue_size=8)
    try:
        requests = [ask([5, 6, 7], 4), ask([8, 9], 4)]
        submitted = now_ns()
        loop.submit(*requests)
        collect.wait(*requests)
    finally:
        loop.close()
    scheduled = [output.metrics.first_scheduled_ns for output in collect.outputs if output.finished]
    assert len(scheduled) == 2
    assert all(one - submitted >= 50e6 for one in scheduled)
    for request in requests:
        tokens = [token for output in collect.outputs if output.key == request.key for token in output.tokens]
        assert tokens == greedy("llama", tuple(request.prompt), 4)
