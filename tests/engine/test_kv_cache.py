"""The cache's books against a model that remembers what every block holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.driving import ask, fill, held, load
from tests.support.properties import examples

SIZE, BLOCKS = 3, 12


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, compute, share prefixes, and go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCacheManager(BLOCKS, SIZE)
        self.content: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS)]
        """What a real cache would hold: slot by slot the token whose keys and values were written."""
        self.open: list[tuple[BlockTable, list[int], int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), more=st.integers(0, 8), reuse=st.booleans())
    def admit(self, tokens: list[int], more: int, reuse: bool) -> None:
        capacity = len(tokens) + more
        table = self.cache.allocate(tokens, capacity, reuse=reuse)
        for source, target in self.cache.take_copies():
            self.content[target] = list(self.content[source])
        if table is None:
            return
        assert table.cached_tokens < len(tokens), "the last token must be computed"
        assert reuse or not table.cached_tokens
        assert held(self.content, table, table.cached_tokens) == tokens[: table.cached_tokens], (
            "the wrong prefix is shared"
        )
        self.open.append((table, tokens, table.cached_tokens))
        assert self.cache.grow(table, capacity) or len(table.blocks) * SIZE >= capacity

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.open) - 1))
        table, tokens, computed = self.open[index]
        if computed == len(tokens):
            tokens = [*tokens, data.draw(st.integers(0, 1))]
        upto = data.draw(st.integers(computed + 1, len(tokens)))
        if not self.cache.grow(table, upto):
            return
        for position in range(computed, upto):
            block = table.blocks[position // SIZE]
            owners = [other for other, _, _ in self.open if block in other.blocks]
            assert owners == [table], "a block is written that another sequence uses"
            assert block not in self.cache._nodes, "a block of the prefix index is written"
            self.content[block][position % SIZE] = tokens[position]
        self.cache.commit(table, tokens, upto)
        self.open[index] = (table, tokens, upto)
        assert held(self.content, table, upto) == tokens[:upto], "the table points at other tokens"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table, _, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.cache.free(table)

    @invariant()
    def books_are_right(self) -> None:
        cache = self.cache
        cache.check()
        assert cache.num_free_blocks + cache.num_cached_blocks + cache.num_used_blocks == BLOCKS
        used = {block for table, _, _ in self.open for block in table.blocks}
        assert cache.num_used_blocks == len(used)
        for block, node in cache._nodes.items():
            assert node.block_id == block
            assert node.parent is cache._tree.root or node.parent.block_id in cache._nodes, (
                "a prefix has lost its beginning"
            )
            assert self.content[block] == list(node.tokens)

    def teardown(self) -> None:
        for table, _, _ in self.open:
            self.cache.free(table)
        assert self.cache.num_used_blocks == self.cache.num_reserved_blocks == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(2), stateful_step_count=40)


def test_the_least_recently_used_leaf_goes_first() -> None:
    cache = KvCacheManager(6, 2)
    cache.free(fill(cache, [1, 1, 2, 2, 3, 3]))
    cache.free(fill(cache, [7, 7, 8, 8]))
    cache.free(fill(cache, [4, 4, 5, 5]))  # one free block, so the first leaf [3, 3] goes
    table = cache.allocate([1, 1, 2, 2, 3, 3, 9], 7)
    assert table is not None
    assert table.cached_tokens == 4, "the beginning of a prefix must outlive its end"


def test_a_reservation_is_never_broken() -> None:
    cache = KvCacheManager(4, 2)
    first = cache.allocate([1], 6)
    assert first is not None
    assert cache.allocate([2], 4) is None
    second = cache.allocate([2], 2)
    assert second is not None
    assert cache.grow(second, 2)
    assert not cache.grow(second, 3)
    assert cache.grow(first, 6)


def test_a_partly_equal_block_is_copied() -> None:
    cache = KvCacheManager(8, 4)
    table = fill(cache, [1, 2, 3, 4])
    other = cache.allocate([1, 2, 9, 9], 4)
    assert other is not None
    assert other.cached_tokens == 2
    [(source, target)] = cache.take_copies()
    assert source == table.blocks[0]
    assert target == other.blocks[0] != source


def test_a_lost_block_is_seen_without_a_look_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine checks counts alone when it is idle: a look at every block would delay the last output."""
    engine = load(checkpoint("llama"))
    with monkeypatch.context() as patch:
        patch.setattr(KvCacheManager, "check", lambda _: pytest.fail("every block was looked at"))
        engine.submit(ask([1, 2, 3]))
        while engine.busy:
            engine.step()
    engine._cache.check()
    engine._cache._free.pop()
    engine.submit(ask([1, 2, 3], 1))
    with pytest.raises(AssertionError, match="1 blocks are lost"):
        engine.step()
    with pytest.raises(AssertionError, match="1 blocks are lost"):
        engine._cache.check()
