"""The cache as the scheduler uses it: copies made later, room reserved before it is taken, leaves evicted first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from tests.engine.support.driving import fill, held
from tests.support.properties import examples

SIZE, BLOCKS = 3, 10
Tokens = st.lists(st.integers(0, 1), min_size=1, max_size=13)


@dataclass
class Owner:
    """An open sequence: how far its keys and values are written, and what it was promised."""

    table: BlockTable
    tokens: list[int]
    capacity: int
    computed: int = field(default=0)


class ReservingMachine(RuleBasedStateMachine):
    """Sequences are opened, kept, grown, cancelled and stepped in any order; several may come before one step."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCacheManager(BLOCKS, SIZE)
        self.content: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS)]
        self.owners: list[Owner] = []

    @rule(tokens=Tokens, more=st.integers(0, 9), reuse=st.booleans())
    def admit(self, tokens: list[int], more: int, reuse: bool) -> None:
        """Only the reservation is made: the blocks come as they are needed."""
        before = self._free_room()
        known = set(self.cache._nodes)
        table = self.cache.allocate(tokens, len(tokens) + more, reuse=reuse)
        if table is None:
            assert self.cache.blocks_for(len(tokens) + more) > before or known, "there was room"
            assert self._free_room() == before, "a refusal has left something behind"
            return
        assert table.cached_tokens < len(tokens)
        assert reuse or not table.cached_tokens
        assert table.cached_tokens >= table.reused_blocks * SIZE
        self.owners.append(Owner(table, tokens, len(tokens) + more, table.cached_tokens))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def grow_within_the_reservation(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        wanted = data.draw(st.integers(0, owner.capacity))
        assert self.cache.grow(owner.table, wanted), "a reservation was broken"
        assert len(owner.table.blocks) * SIZE >= wanted

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), more=st.integers(1, 9))
    def grow_beyond_the_reservation(self, data: st.DataObject, more: int) -> None:
        """It may fail, but only for want of room, and never at the cost of another's reservation."""
        owner = data.draw(st.sampled_from(self.owners))
        wanted = owner.capacity + more
        if self.cache.grow(owner.table, wanted):
            owner.capacity = max(owner.capacity, len(owner.table.blocks) * SIZE)
        else:
            assert self._free_room() == 0
            assert not owner.table.reserved

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Copies are made; then some sequences write, and commit when all have written."""
        self._make_copies()
        for owner in self.owners:
            assert held(self.content, owner.table, owner.computed) == owner.tokens[: owner.computed]
        computing = data.draw(st.lists(st.sampled_from(self.owners), unique_by=id, min_size=1))
        ends = [self._write(owner, data) for owner in computing]
        for owner, end in zip(computing, ends, strict=True):
            self.cache.commit(owner.table, owner.tokens, end)
            owner.computed = end

    def _write(self, owner: Owner, data: st.DataObject) -> int:
        room = min(owner.capacity, owner.computed + 5)
        end = data.draw(st.integers(owner.computed, room))
        while len(owner.tokens) < end:
            owner.tokens = [*owner.tokens, data.draw(st.integers(0, 1))]
        assert self.cache.grow(owner.table, end), "a reservation was broken"
        for position in range(owner.computed, end):
            block = owner.table.blocks[position // SIZE]
            assert self.cache._references[block] == 1, "a shared block is written"
            assert block not in self.cache._nodes, "an indexed block is written"
            self.content[block][position % SIZE] = owner.tokens[position]
        return end

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Between steps: what was to be copied is copied by then."""
        self._make_copies()
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.cache.free(owner.table)
        assert not owner.table.blocks
        assert not owner.table.reserved

    def _make_copies(self) -> None:
        """All at once: every source is read before anything is written."""
        copies = self.cache.take_copies()
        read = [list(self.content[copy.source]) for copy in copies]
        assert len({copy.target for copy in copies}) == len(copies), "two copies go to one block"
        for copy, content in zip(copies, read, strict=True):
            self.content[copy.target] = content

    @invariant()
    def books_are_right(self) -> None:
        cache = self.cache
        cache.check()
        assert cache.num_free_blocks + cache.num_cached_blocks + cache.num_used_blocks == BLOCKS
        assert cache.num_reserved_blocks == sum(owner.table.reserved for owner in self.owners)
        counts = [0] * BLOCKS
        for owner in self.owners:
            assert len(set(owner.table.blocks)) == len(owner.table.blocks), "a block is twice in a table"
            for block in owner.table.blocks:
                counts[block] += 1
            for block in owner.table.blocks[owner.table.indexed :]:
                assert block not in cache._nodes
        assert counts == cache._references

    @invariant()
    def the_index_is_a_forest_without_gaps(self) -> None:
        cache = self.cache
        for block, node in cache._nodes.items():
            assert cache._tree.child(node.parent, node.tokens) is node
            assert node.block_id == block
            assert node.children_on_device == len(node.children)
            children = [cache._references[child.block_id] for child in node.children]
            assert cache._references[block] >= max(children, default=0)
        idle = {block for block, node in cache._nodes.items() if not cache._references[block] and not node.children}
        assert len(cache._evictable) == len(idle)

    def teardown(self) -> None:
        for owner in self.owners:
            self.cache.free(owner.table)
        self.cache.check()
        assert self.cache.num_used_blocks == self.cache.num_reserved_blocks == 0
        assert self.cache.grow(BlockTable([], 0, 0), BLOCKS * SIZE), "every block can be had again"

    def _free_room(self) -> int:
        return self.cache.num_free_blocks + self.cache.num_cached_blocks - self.cache.num_reserved_blocks


TestReservingMachine = ReservingMachine.TestCase
TestReservingMachine.settings = settings(max_examples=examples(2), stateful_step_count=40)


@pytest.mark.parametrize("wanted", range(1, 7))
def test_eviction_takes_the_oldest_leaves_first(wanted: int) -> None:
    """Two branches of one prefix, one used more recently: what is left is always the newest of it, from its root."""
    cache = KvCacheManager(6, 2)
    cache.free(fill(cache, [1, 1, 2, 2, 3, 3]))
    cache.free(fill(cache, [1, 1, 4, 4, 5, 5, 6, 6]))
    order = [(3, 3), (2, 2), (6, 6), (5, 5), (4, 4), (1, 1)]
    assert {node.tokens for node in cache._nodes.values()} == set(order)
    assert cache.grow(BlockTable([], 0, 0), wanted * 2)
    assert {node.tokens for node in cache._nodes.values()} == set(order[wanted:])


def test_use_makes_a_prefix_young_again() -> None:
    cache = KvCacheManager(4, 2)
    cache.free(fill(cache, [1, 1, 2, 2]))
    cache.free(fill(cache, [7, 7, 8, 8]))
    again = cache.allocate([1, 1, 2, 2, 3], 4)
    assert again is not None
    cache.free(again)
    assert cache.grow(BlockTable([], 0, 0), 4)
    assert {node.tokens for node in cache._nodes.values()} == {(1, 1), (2, 2)}


def test_equal_sequences_end_in_the_same_blocks() -> None:
    """Two that computed the same prompt at once share it from then on."""
    cache = KvCacheManager(8, 2)
    first, second = (cache.allocate([1, 2, 3, 4, 5], 6) for _ in range(2))
    assert first is not None
    assert second is not None
    for table in (first, second):
        assert cache.grow(table, 5)
    for table in (first, second):
        cache.commit(table, [1, 2, 3, 4, 5], 5)
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert cache.num_used_blocks == 4
    cache.check()


def test_without_reuse_nothing_stays() -> None:
    cache = KvCacheManager(4, 2, prefix_reuse=False)
    cache.free(fill(cache, [1, 2, 3, 4]))
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (4, 0)
    table = cache.allocate([1, 2, 3, 4, 5], 5)
    assert table is not None
    assert table.cached_tokens == 0


def test_the_books_do_not_grow_with_use() -> None:
    """A prefix that is used for days, in a cache that never fills, takes no more memory than on the first day."""
    cache = KvCacheManager(16, 2)
    for turn in range(2000):
        cache.free(fill(cache, [1, 1, 2, 2, 3 + turn % 3, 3]))
    assert len(cache._evictable._heap) <= 3 * cache.num_blocks + 64
    assert cache.grow(BlockTable([], 0, 0), 32), "every block can be had all the same"
    assert not cache._nodes


def test_a_prefix_in_use_is_never_evicted() -> None:
    """It is the oldest leaf by its last use, and in use again: what is younger and idle goes in its place."""
    cache = KvCacheManager(5, 2)
    cache.free(fill(cache, [1, 1, 2, 2]))
    cache.free(fill(cache, [7, 7, 8, 8]))
    again = cache.allocate([1, 1, 2, 2, 3], 4)
    assert again is not None
    assert cache.grow(BlockTable([], 0, 0), 6)
    assert {node.tokens for node in cache._nodes.values()} == {(1, 1), (2, 2)}
    assert not cache.grow(BlockTable([], 0, 0), 2), "all that is left is in use"
    cache.check()
