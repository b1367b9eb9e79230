"""Priorities, aging and deadlines: who is served first, and that nobody is left out for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.chunk import Chunk
from inflight.engine.request import FinishReason
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.errors import DeadlineExceeded
from tests.engine.support.books import SECOND, Books
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, assert_idle, load


def _tokens(chunks: list[Chunk]) -> int:
    return sum(chunk.size for chunk in chunks)


def _drain(books: Books) -> None:
    while books.step():
        pass


def _first_of(books: Books, *sequences: Sequence) -> Sequence:
    """Return which of those that wait is admitted first."""
    while all(one.table is None for one in sequences):
        books.step()
    return next(one for one in sequences if one.table is not None)


@pytest.mark.parametrize(
    ("levels", "seconds", "overtakes"), [(1, 9, True), (1, 11, False), (3, 29, True), (3, 31, False)]
)
def test_a_level_of_priority_is_worth_its_seconds_of_waiting(levels: int, seconds: int, overtakes: bool) -> None:
    books = Books(max_batch_size=1, blocks=32, priority_aging_ns=10 * SECOND)
    books.add(4, max_tokens=60)
    books.step()
    early = books.add(4)
    for _ in range(seconds):
        books.step()
    late = books.add(4, priority=levels)
    assert _first_of(books, early, late) is (late if overtakes else early)


def test_strict_priorities_do_not_age() -> None:
    books = Books(max_batch_size=1, blocks=32, priority_aging_ns=None)
    books.add(4, max_tokens=100)
    early = books.add(4)
    for _ in range(90):
        books.step()
    late = books.add(4, priority=1)
    assert _first_of(books, early, late) is late


@pytest.mark.parametrize("aging_ns", [None, 100 * SECOND])
def test_among_equals_the_earliest_deadline_is_first(aging_ns: int | None) -> None:
    books = Books(max_batch_size=1, priority_aging_ns=aging_ns)
    patient, later, soon, urgent = (
        books.add(4, priority=priority, deadline_ns=deadline)
        for priority, deadline in ((0, None), (0, 90 * SECOND), (0, 80 * SECOND), (1, None))
    )
    _drain(books)
    assert books.ended == [urgent, soon, later, patient]


def test_deadlines_do_not_starve_who_has_none() -> None:
    """It is due 10 s after its arrival: nobody whose deadline is later than that goes before it."""
    books = Books(max_batch_size=1, priority_aging_ns=10 * SECOND)
    patient = books.add(4, max_tokens=3)
    while patient.table is None:
        books.add(4, max_tokens=3, deadline_ns=books.now_ns + 4 * SECOND)
        books.step()
    hasty = [one.request.deadline_ns or 0 for one in books.ended + books.late]
    assert len(hasty) >= 6
    assert all(deadline <= patient.request.arrival_ns + 10 * SECOND for deadline in hasty)


def test_a_stream_of_higher_priority_does_not_starve_the_lower() -> None:
    books = Books(max_batch_size=1, priority_aging_ns=10 * SECOND)
    low = books.add(4, max_tokens=3)
    while low.table is None:
        books.add(4, max_tokens=3, priority=2)
        books.step()
        assert books.now_ns < 1000 * SECOND
    # Those that came within its 20 s are before it, 20 of them, each 3 steps long; and whoever came later is not.
    assert all(one.request.arrival_ns <= low.request.arrival_ns + 20 * SECOND for one in books.ended)
    assert len(books.ended) >= 19


@given(
    batch=st.integers(1, 4),
    budget=st.integers(1, 12),
    chunk=st.none() | st.integers(1, 12),
    aging=st.none() | st.integers(1, 20),
    seed=st.integers(0, 2**16),
)
def test_nobody_waits_longer_than_the_work_before_it(
    batch: int, budget: int, chunk: int | None, aging: int | None, seed: int
) -> None:
    """With ``guaranteed_no_evict`` a sequence waits at most one step per token of what ran when it came and of what
    ranks before it; cancellations make it less."""
    chance = random.Random(seed)
    aging_ns = None if aging is None else aging * SECOND
    books = Books(
        blocks=10,
        max_batch_size=batch,
        max_tokens_per_step=budget,
        prefill_chunk_tokens=chunk if chunk and chunk <= budget else None,
        priority_aging_ns=aging_ns,
    )
    added: list[Sequence] = []
    ran: dict[Sequence, list[Sequence]] = {}
    came: dict[Sequence, int] = {}
    admitted: dict[Sequence, int] = {}
    cancelled: set[Sequence] = set()
    for step in range(1000):
        if step < 40 and chance.random() < 0.6:
            deadline = books.now_ns + chance.randint(1, 60) * SECOND if chance.random() < 0.3 else None
            new = books.add(chance.randint(1, 14), chance.randint(1, 8), chance.randint(-1, 2), deadline_ns=deadline)
            added.append(new)
            ran[new], came[new] = list(books.scheduler.running), step
        if added and chance.random() < 0.05:
            victim = chance.choice(added)
            if victim not in (*books.ended, *books.late, *cancelled):
                books.scheduler.remove(victim)
                cancelled.add(victim)
        parts = books.step()
        if step > 40 and not parts:
            break
        for part in parts:
            admitted.setdefault(part.sequence, step)
    assert set(admitted) >= set(added) - cancelled - set(books.late)
    for sequence, step in admitted.items():
        before = ran[sequence] + [one for one in added if one.sort_key < sequence.sort_key]
        work = sum(len(one.request.prompt) + one.request.sampling.max_tokens for one in set(before))
        assert step - came[sequence] <= work


def test_a_prompt_that_cannot_be_done_in_time_is_not_begun() -> None:
    books = Books(max_tokens_per_step=4, blocks=32)
    slow = books.add(20, deadline_ns=books.now_ns + 3 * SECOND)
    books.scheduler.remove(slow)
    for seconds in (3.0, 2.0, 5.0):
        books.scheduler.observe_step(_tokens(books.scheduler.schedule()), seconds)  # of no token: says nothing
    first = books.add(4)
    books.scheduler.observe_step(_tokens(books.step()), 2.0)
    assert first.generated
    hopeless = books.add(20, deadline_ns=books.now_ns + 9 * SECOND)
    possible = books.add(20, deadline_ns=books.now_ns + 11 * SECOND)
    unknown = books.add(3, deadline_ns=books.now_ns + 11 * SECOND)
    books.step()
    books.step()
    assert books.late == [hopeless]
    assert not hopeless.metrics.steps
    assert hopeless.table is None
    assert {possible, unknown} <= {*books.scheduler._queue, *books.scheduler.running}


@pytest.mark.parametrize(("seconds", "begun"), [((2.0, 1.0, 5.0), True), ((2.0, 1.5, 5.0), False)])
def test_the_fastest_full_step_says_what_can_be_done_in_time(seconds: tuple[float, ...], begun: bool) -> None:
    books = Books(max_tokens_per_step=4, blocks=64)
    for took in seconds:
        books.scheduler.observe_step(4, took)
    prompt = books.add(20, deadline_ns=books.now_ns + 6 * SECOND)
    books.step()
    assert (prompt.table is not None) == begun


def test_a_preempted_sequence_that_has_tokens_waits_until_its_deadline() -> None:
    books = Books("max_utilization", blocks=6, prefix_reuse=False, max_tokens_per_step=4)
    books.add(7, max_tokens=12)
    second = books.add(7, max_tokens=12, deadline_ns=10**18)
    while not second.metrics.preemptions or second.table is not None:
        books.step()
    assert second.generated
    books.scheduler.observe_step(4, 10.0**9)
    while second not in books.ended + books.late:
        books.step()
    assert second in books.ended


def test_who_is_too_late_can_be_cancelled_before_it_is_told() -> None:
    books = Books(max_tokens_per_step=4, blocks=32)
    books.add(4)
    books.scheduler.observe_step(_tokens(books.step()), 2.0)
    hopeless = books.add(20, deadline_ns=books.now_ns + SECOND)
    books.step()
    books.scheduler.remove(hopeless)
    assert books.scheduler.take_expired() == []


def test_a_step_that_was_disturbed_does_not_refuse_for_ever() -> None:
    books = Books(max_tokens_per_step=4, blocks=64)
    books.add(4)
    books.scheduler.observe_step(_tokens(books.step()), 2.0)
    hopeful = [books.add(20, deadline_ns=books.now_ns + SECOND)]
    books.step()
    assert hopeful[0].table is None
    while hopeful[-1].table is None:
        assert len(hopeful) < 30
        hopeful.append(books.add(20, deadline_ns=books.now_ns + SECOND))
        books.step()
    books.scheduler.forget_step_times()
    assert not books.scheduler._full_step_s


def test_deadlines_that_have_no_owner_any_more_are_forgotten() -> None:
    books = Books()
    patient = [books.add(4, deadline_ns=10**18) for _ in range(5)]
    for _ in range(500):
        books.scheduler.remove(books.add(4, deadline_ns=10**17))
        assert len(books.scheduler._queue._deadlines) == len(patient)
    books.now_ns = 10**18
    assert books.scheduler.take_expired() == patient


def test_the_engine_ends_who_is_late_with_an_error_or_with_what_it_has() -> None:
    """One never begins, since its prompt takes too many steps; one has begun and keeps its tokens; one is in time."""
    engine = load(checkpoint("llama"), max_tokens_per_step=8)
    scheduler: Scheduler = engine._scheduler
    now_ns = 10**18
    scheduler._clock = lambda: now_ns
    running, hopeless, good = ask([1] * 8, 50, deadline_ns=now_ns + 5 * SECOND), ask([2] * 40, 4), ask([3] * 8, 4)
    engine.submit(running)
    outputs = engine.step()
    scheduler._full_step_s = 1.0
    hopeless.deadline_ns = now_ns + 4 * SECOND
    engine.submit(hopeless)
    engine.submit(good)
    while engine.busy:
        now_ns += SECOND // 2
        outputs += engine.step()
    assert_idle(engine)
    last = {output.key: output for output in outputs if output.finished}
    assert isinstance(last[hopeless.key].error, DeadlineExceeded)
    assert last[running.key].finish_reason is FinishReason.DEADLINE
    tokens = [token for output in outputs if output.key == running.key for token in output.tokens]
    assert tokens == greedy("llama", tuple(running.prompt), 50)[: len(tokens)]
    assert 5 <= len(tokens) < 50
    assert last[good.key].finish_reason is FinishReason.LENGTH
