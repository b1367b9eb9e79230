"""Clients take turns: what backlogged clients get differs by no more than what one of them may have in flight."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine import request_queue
from inflight.engine.request import Request
from inflight.engine.request_queue import RequestQueue
from inflight.engine.sequence import Sequence
from inflight.sampling import SamplingParams
from tests.engine.support.books import POLICIES, Books, Policy
from tests.support.properties import examples


def _sequence(order: int, client: str, priority: int = 0) -> Sequence:
    return Sequence(Request([1], SamplingParams(1), priority=priority, client_id=client), order, 0, 64, None)


def _served(queue: RequestQueue, client: str) -> int:
    """Return a client's virtual tokens; 0: it is not known."""
    return queue._clients[client].served_tokens if client in queue._clients else 0


class Naive:
    """What the queue should say, by looking at everything each time."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.served: Counter[str] = Counter()
        self.last = ""

    def push(self, sequence: Sequence) -> None:
        """Add one, and lift its client if it begins to wait."""
        client, clients = sequence.request.client_id, {one.request.client_id for one in self.waiting}
        if client not in clients:
            level = min((self.served[one] for one in clients), default=self.served[self.last])
            self.served[client] = max(self.served[client], level)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take one out."""
        self.waiting.remove(sequence)
        if all(one.request.client_id != sequence.request.client_id for one in self.waiting):
            self.last = sequence.request.client_id

    def allows(self, sequence: Sequence) -> bool:
        """Whether this one may be next: of a least served client, and the best of it."""
        client = sequence.request.client_id
        least = min(self.served[one.request.client_id] for one in self.waiting)
        best = min(one.sort_key for one in self.waiting if one.request.client_id == client)
        return self.served[client] == least and sequence.sort_key == best


@settings(max_examples=examples(3))
@given(
    operations=st.lists(
        st.tuples(st.sampled_from("push push pop leave charge".split()), st.integers(0, 3), st.integers(0, 9)),
        max_size=120,
    )
)
def test_the_queue_does_what_looking_at_everything_would(operations: list[tuple[str, int, int]]) -> None:
    queue, naive = RequestQueue(fair=True), Naive()
    gone: list[Sequence] = []
    for order, (what, client, number) in enumerate(operations):
        if what == "push":
            sequence = _sequence(order, f"client {client}", number % 3)
            queue.push(sequence)
            naive.push(sequence)
        elif what == "pop" and naive.waiting:
            assert naive.allows(queue.first)
            gone.append(queue.pop())
            naive.remove(gone[-1])
        elif what == "leave" and naive.waiting:
            sequence = naive.waiting[number % len(naive.waiting)]
            queue.remove(sequence)
            naive.remove(sequence)
        elif what == "charge" and gone:
            sequence = gone[number % len(gone)]
            queue.charge(sequence.request.client_id, number)
            naive.served[sequence.request.client_id] += number
        assert list(queue) == naive.waiting
        assert not naive.waiting or naive.allows(queue.first)
        assert all(_served(queue, name) == count for name, count in naive.served.items() if count)


def test_a_flood_does_not_hold_up_another_client() -> None:
    books = Books(fairness="client", max_batch_size=1)
    flood = [books.add(4, max_tokens=4, client_id="flood") for _ in range(20)]
    while flood[0] not in books.ended:
        books.step()
    books.step()
    quiet = books.add(4, max_tokens=4, client_id="quiet")
    while quiet not in books.ended:
        books.step()
    assert books.ended == [*flood[:2], quiet], "it waits for what runs, and no longer"


def test_priority_is_among_a_clients_own() -> None:
    books = Books(fairness="client", max_batch_size=1)
    urgent = [books.add(4, max_tokens=4, priority=9, client_id="loud") for _ in range(3)]
    low, high = (books.add(4, max_tokens=4, priority=priority, client_id="modest") for priority in (0, 1))
    while books.step():
        pass
    assert books.ended == [urgent[0], high, urgent[1], low, urgent[2]]


def test_what_comes_of_drafts_counts_and_what_is_cached_does_not() -> None:
    books = Books(fairness="client", blocks=32)
    first = books.add(list(range(9)), max_tokens=9, client_id="one")
    books.step()
    books.step()
    assert _served(books.scheduler._queue, "one") == 10
    first.tokens += [1, 2, 3]  # accepted: the engine computes and books them behind the scheduler's chunk
    books.cache.mark_computed(first.table, first.computed + 3)
    books.step()
    assert _served(books.scheduler._queue, "one") == 14
    books.cache.mark_computed(first.table, first.computed + 2)
    books.scheduler.remove(first)
    assert _served(books.scheduler._queue, "one") == 16, "also those of the step that it ends with"
    books.add(list(range(9)), max_tokens=1, client_id="two")
    books.step()
    assert _served(books.scheduler._queue, "two") == 16 + 1, "8 of its 9 tokens come from the prefix cache"


def test_who_was_away_has_saved_nothing() -> None:
    books = Books(fairness="client", max_batch_size=1)
    books.add(4, max_tokens=4, client_id="away")
    there = [books.add(4, max_tokens=4, client_id="there") for _ in range(12)]
    while there[5] not in books.ended:
        books.step()
    back = [books.add(4, max_tokens=4, client_id="away") for _ in range(6)]
    while books.step():
        pass
    after = books.ended[books.ended.index(there[5]) + 1 :]
    assert len(after) == 12
    for count in range(1, 13):
        assert abs(sum(one in back for one in after[:count]) * 2 - count) <= 2, "by turns, one each"


def test_who_comes_back_keeps_its_count() -> None:
    queue = RequestQueue(fair=True)
    other, served = _sequence(0, "other"), _sequence(1, "served")
    queue.push(other)
    queue.push(served)
    queue.remove(served)
    queue.charge("served", 5)
    queue.push(_sequence(2, "served"))
    assert _served(queue, "served") == 5
    assert queue.pop() is other


def test_without_fairness_it_is_by_arrival() -> None:
    books = Books(max_batch_size=1)
    added = [books.add(4, max_tokens=4, client_id=client) for client in "aaab"]
    while books.step():
        pass
    assert books.ended == added


@pytest.mark.proof
@settings(max_examples=examples(3))
@given(
    policy=st.sampled_from(POLICIES),
    batch=st.integers(1, 4),
    budget=st.integers(1, 16),
    seed=st.integers(0, 2**16),
    clients=st.integers(2, 4),
)
def test_backlogged_clients_get_as_much(policy: Policy, batch: int, budget: int, seed: int, clients: int) -> None:
    """While two clients wait without a break, the tokens computed for them differ by 2 * U at most: U is what one
    client may have in flight, ``max_batch_size`` sequences of the longest length. Their counts differ by U at most."""
    chance, longest = random.Random(seed), 20
    books = Books(policy, 16, fairness="client", max_batch_size=batch, max_tokens_per_step=budget, prefix_reuse=False)
    names = [f"client {number}" for number in range(clients)]
    bound = batch * longest
    served: Counter[str] = Counter()
    since: dict[tuple[str, str], tuple[int, int]] = {}
    computed: Counter[Sequence] = Counter()
    compared = 0
    for step in range(150):
        for name in names * (8 if step == 0 else 1):
            if chance.random() < 0.4 or step == 0:
                prompt = chance.randint(1, 12)
                books.add(prompt, chance.randint(1, longest - prompt), chance.randint(0, 2), client_id=name)
        waits = {one.request.client_id for one in books.scheduler._queue}
        for pair in combinations(names, 2):
            if not set(pair) <= waits:
                since.pop(pair, None)
                continue
            first, second = pair
            begun = since.setdefault(pair, (served[first], served[second]))
            assert abs((served[first] - begun[0]) - (served[second] - begun[1])) <= 2 * bound
            compared += 1
            queue = books.scheduler._queue
            assert abs(_served(queue, first) - _served(queue, second)) <= bound
        for chunk in books.step():
            new = max(0, chunk.start + chunk.size - computed[chunk.sequence])
            computed[chunk.sequence] += new
            served[chunk.sequence.request.client_id] += new
    assert compared > 3


def test_no_more_clients_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "REMEMBERED_CLIENTS", 8)
    queue = RequestQueue(fair=True)
    waits = [_sequence(order, f"waits {order}") for order in range(5)]
    for sequence in waits:
        queue.push(sequence)
        queue.charge(sequence.request.client_id, 1)
    for order in range(5, 500):
        sequence = _sequence(order, f"client {order}")
        queue.push(sequence)
        queue.remove(sequence)
        queue.charge(sequence.request.client_id, 3)
        assert len(queue._clients) <= 8 + len(queue) + 1
        assert len(queue._waiting_clients) == len(waits)
    assert [queue.pop() for _ in range(len(queue))] == waits
