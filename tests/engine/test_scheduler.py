"""The scheduler without a model: budget, order, capacity, preemption; and that everybody gets there in the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.scheduler import Scheduler
from tests.engine.support.books import POLICIES, SECOND, SIZE, Books, Policy, Tier, sizes
from tests.engine.support.driving import fill
from tests.support.properties import examples


def test_a_prompt_is_chunked_by_the_budget() -> None:
    books = Books(max_tokens_per_step=5)
    sequence = books.add(12)
    chunks = []
    for _ in range(3):
        assert not sequence.generated, "only the last chunk makes a token"
        chunks += [(chunk.start, chunk.size) for chunk in books.step()]
    assert chunks == [(0, 5), (5, 5), (10, 2)]
    assert sequence.generated == 1


def test_who_decodes_goes_first_then_who_prefills_then_who_waits() -> None:
    books = Books(max_tokens_per_step=8)
    decodes = books.add(3, priority=-5)
    books.step()
    prefills = books.add(20, priority=-1)
    assert sizes(books.step()) == {decodes: 1, prefills: 7}
    waits = books.add(2, priority=9)
    assert sizes(books.step()) == {decodes: 1, prefills: 7}
    assert sizes(books.step()) == {prefills: 6, decodes: 1, waits: 1}


def test_the_queue_is_by_priority_then_arrival() -> None:
    books = Books(max_batch_size=1)
    for priority in (0, 2, 1, 2, -1):
        books.add(2, max_tokens=1, priority=priority)
    while books.step():
        pass
    assert [(one.request.priority, one.order) for one in books.ended] == [(2, 1), (2, 3), (1, 2), (0, 0), (-1, 4)]


def test_guaranteed_no_evict_admits_only_what_can_finish() -> None:
    books = Books("guaranteed_no_evict", blocks=6)
    first, second = books.add(4, max_tokens=12), books.add(4, max_tokens=5)
    assert set(sizes(books.step())) == {first}
    while second.table is None:
        books.step()
    assert books.ended == [first]
    while books.step():
        pass
    assert not first.metrics.preemptions
    assert not second.metrics.preemptions


def test_max_utilization_takes_from_the_lowest_rank_and_gives_back() -> None:
    books = Books("max_utilization", blocks=6, prefix_reuse=False)
    high, low, lowest = (books.add(7, max_tokens=9, priority=priority) for priority in (2, 1, 0))
    assert set(sizes(books.step())) == {high, low, lowest}
    while not lowest.metrics.preemptions:
        assert not books.ended
        books.step()
    assert not high.metrics.preemptions
    while books.step():
        pass
    assert books.ended == [high, low, lowest]
    assert [one.generated for one in books.ended] == [9, 9, 9]


def test_who_was_preempted_keeps_its_place() -> None:
    """Its rank is that of its arrival: who came later does not overtake it."""
    books = Books("max_utilization", blocks=6, prefix_reuse=False)
    books.add(7, max_tokens=12)
    second = books.add(7, max_tokens=12)
    third = books.add(15, max_tokens=2)
    while books.step():
        pass
    assert second.metrics.preemptions > 0
    assert books.ended.index(second) < books.ended.index(third)


@pytest.mark.parametrize("too_late", [False, True])
def test_what_is_not_admitted_leaves_no_trace(too_late: bool) -> None:
    """Ten blocks are known, more than a step's budget, the last in the second tier; there is room for it and no more.
    Or there is room, and a deadline that cannot be met."""
    books = Books("max_utilization", max_tokens_per_step=8)
    cache = books.cache = KvCacheManager(16, SIZE, offload_pool=Tier(1))
    scheduler = books.scheduler = Scheduler(books.config, cache, lambda: books.now_ns)
    cache.free(fill(cache, list(range(40))))
    held, taken = BlockTable([], 0, 0), BlockTable([], 0, 0)
    assert cache.grow(held, 6 * SIZE)
    assert cache.grow(taken, SIZE)
    cache.free(taken)
    cache.take_copies()
    if too_late:
        cache.free(held)
        scheduler._full_step_s = 5.0
    waits = books.add(list(range(49)), deadline_ns=3 * SECOND if too_late else None)

    def traces() -> tuple[list[tuple[int, int]], int, int]:
        nodes = [*cache._nodes.values(), *cache.offloaded._nodes.values()]
        return [(node.uses, node.block_id) for node in nodes], cache.counts.restored_tokens, cache.num_free_blocks

    before = traces()
    for _ in range(2):
        assert not scheduler.schedule()
        assert traces() == before
        assert not cache.take_copies()
    if too_late:
        assert scheduler.take_expired() == [waits]
    else:
        cache.free(held)
        assert sizes(books.step()) == {waits: 8}
        assert waits.metrics.cached_tokens == 40
        assert cache.counts.restored_tokens == SIZE


@pytest.mark.parametrize("where", ["waiting", "running", "preempted"])
def test_a_sequence_can_be_removed_from_anywhere(where: str) -> None:
    books = Books("max_utilization", blocks=6, prefix_reuse=False, max_batch_size=2 if where == "waiting" else 8)
    books.add(7, max_tokens=12)
    second, third = books.add(7, max_tokens=12), books.add(1, max_tokens=2)
    books.step()
    if where == "preempted":
        while not second.metrics.preemptions or second.table is not None:
            books.step()
    victim = third if where == "waiting" else second
    assert books.scheduler.num_paused == (where == "preempted")
    books.scheduler.remove(victim)
    assert victim not in [*books.scheduler.running, *books.scheduler._queue]
    assert books.scheduler.num_paused == 0
    assert books.scheduler.num_running_requests == len(books.scheduler.running)
    while books.step():
        pass
    assert victim not in books.ended
    assert (books.cache.num_used_blocks, books.cache.num_reserved_blocks) == (0, 0)


def test_block_counts_are_those_of_the_cache() -> None:
    books = Books(blocks=16)
    tokens = list(range(13))
    first, second = books.add(tokens, 3), books.add(tokens, 3)
    books.step()
    assert first.metrics.cached_tokens == 0
    assert second.metrics.cached_tokens == 0, "nothing was computed when it was admitted"
    while books.step():
        pass
    third = books.add(tokens, 3)
    while books.step():
        pass
    assert (third.metrics.reused_blocks, third.metrics.cached_tokens) == (3, 12)
    assert third.metrics.total_blocks == third.metrics.reused_blocks + third.metrics.new_blocks == 4


@settings(max_examples=examples(3))
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.integers(4, 12),
    budget=st.integers(1, 20),
    batch=st.integers(1, 6),
    reuse=st.booleans(),
    mode=st.sampled_from(["inflight", "dynamic", "static"]),
    fairness=st.sampled_from(["none", "client"]),
    chunk=st.none() | st.integers(1, 20),
    arrivals=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 8), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=14
    ),
    removals=st.sets(st.integers(0, 13), max_size=3),
)
def test_everybody_gets_there(
    policy: Policy,
    blocks: int,
    budget: int,
    batch: int,
    reuse: bool,
    mode: str,
    fairness: str,
    chunk: int | None,
    arrivals: list[tuple[int, int, int, int]],
    removals: set[int],
) -> None:
    """Whatever comes, each sequence ends with all its tokens, or leaves when it is told to; then the cache is idle."""
    books = Books(
        policy,
        blocks,
        max_tokens_per_step=budget,
        max_batch_size=batch,
        prefix_reuse=reuse,
        mode=mode,
        max_queue_delay_ms=2000,
        fairness=fairness,
        prefill_chunk_tokens=chunk,
    )
    chance, expected = random.Random(2), []
    for index, (length, max_tokens, priority, pause) in enumerate(arrivals):
        prompt = [chance.randrange(2) for _ in range(min(length, blocks * SIZE - 1))]
        sequence = books.add(prompt, max_tokens, priority, client_id=str(index % 3))
        for _ in range(pause):
            books.step()
        if index in removals and sequence not in books.ended:
            books.scheduler.remove(sequence)
        else:
            expected.append(sequence)
    for _ in range(20_000):
        if not (books.scheduler.running or books.scheduler.num_waiting):
            break
        books.step()
    assert sorted(one.order for one in books.ended) == [one.order for one in expected]
    for sequence in expected:
        longest = blocks * SIZE - len(sequence.request.prompt)
        assert sequence.generated == min(sequence.request.sampling.max_tokens, longest)
        assert policy == "max_utilization" or not sequence.metrics.preemptions
    assert (books.cache.num_used_blocks, books.cache.num_reserved_blocks) == (0, 0)
