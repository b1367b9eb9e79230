"""The books with a second tier, under every eviction policy, against a model that remembers what every place holds."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.engine.kvcache.blocks import BlockTable, CacheCounts
from inflight.engine.kvcache.eviction import POLICIES, EvictionQueue
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.kvcache.offload import OffloadedBlocks
from inflight.engine.kvcache.offload_pool import RestoreRule
from inflight.engine.kvcache.prefix_tree import Node, PrefixTree
from inflight.engine.kvcache.retention import RetentionRange
from tests.engine.support.books import Tier
from tests.engine.support.driving import fill
from tests.support.properties import examples

SIZE, BLOCKS, OFFLOAD_BLOCKS = 2, 8, 5
Tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class Owner:
    """An open sequence, and how far it is computed."""

    def __init__(self, table: BlockTable, tokens: list[int]) -> None:
        self.table, self.tokens, self.computed = table, tokens, table.cached_tokens


class OffloadMachine(RuleBasedStateMachine):
    """Steps as the engine does them: some are admitted, copies are made, some compute, some leave or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.owners: list[Owner] = []
        self.content: list[list[int | None]] = [[None] * SIZE for _ in range(BLOCKS + OFFLOAD_BLOCKS)]

    @initialize(policy=st.sampled_from(sorted(POLICIES)), blocks=st.integers(1, OFFLOAD_BLOCKS))
    def begin(self, policy: str, blocks: int) -> None:
        self.tier = Tier(blocks)
        self.cache = KvCacheManager(BLOCKS, SIZE, eviction=policy, offload_pool=self.tier, now_ns=lambda: self.now_ns)

    @rule(
        prompts=st.lists(Tokens, min_size=1, max_size=3),
        more=st.integers(-8, 4),
        pay=st.booleans(),
        priority=st.integers(0, 100),
        duration_ms=st.sampled_from([None, 1, 3]),
        too_late=st.sampled_from([-1, 0, 1]),
    )
    def admit(
        self,
        prompts: list[list[int]],
        more: int,
        pay: bool,
        priority: int,
        duration_ms: int | None,
        too_late: int,
    ) -> None:
        """Several before one step, one of them in vain; ``max_utilization`` asks for less than the prompt."""
        self.now_ns += 1_000_000
        self.tier.pay = pay
        for index, tokens in enumerate(prompts):
            retention = (RetentionRange(0, 5, priority, duration_ms),) if priority % 2 else ()
            restored = self.cache.counts.restored_tokens
            table = self.cache.allocate(tokens, max(1, len(tokens) + more), retention=retention)
            assert pay or self.cache.counts.restored_tokens == restored
            if table is not None:
                assert table.cached_tokens < len(tokens), "the last token must be computed"
                self.owners.append(Owner(table, tokens))
            if table is not None and index == too_late:
                self.cache.free(self.owners.pop().table)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.make_copies()
        for owner in self.owners:
            assert self.held(owner) == owner.tokens[: owner.computed], "the wrong prefix is shared"
        for owner in self.owners:
            if owner.computed == len(owner.tokens):
                owner.tokens = [*owner.tokens, data.draw(st.integers(0, 1))]
            end = data.draw(st.integers(owner.computed, len(owner.tokens)))
            if not self.cache.grow(owner.table, end):
                continue
            self.make_copies()
            for position in range(owner.computed, end):
                block = owner.table.blocks[position // SIZE]
                assert block not in self.cache._nodes, "a block of the prefix index is written"
                self.content[block][position % SIZE] = owner.tokens[position]
            self.cache.commit(owner.table, owner.tokens, end)
            owner.computed = end
            assert self.held(owner) == owner.tokens[:end], "the table points at other tokens"

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Before its first step too."""
        self.cache.free(self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))).table)

    @rule()
    def fail(self) -> None:
        """No copy is made, and all that were to run end."""
        self.cache.take_copies()
        self.cache.offloaded.clear()
        for owner in self.owners:
            self.cache.free(owner.table)
        self.owners.clear()

    @precondition(lambda self: not self.owners)
    @rule()
    def lose_the_tier(self) -> None:
        self.make_copies()
        self.tier.there = False

    def make_copies(self) -> None:
        copies = self.cache.take_copies()
        blocks = [target for _, target in copies if target < BLOCKS]
        assert len(set(blocks)) == len(blocks), "two copies go to one block"
        for source, target in copies:
            self.content[target] = list(self.content[source])

    def held(self, owner: Owner) -> list[int | None]:
        return [token for block in owner.table.blocks for token in self.content[block]][: owner.computed]

    @invariant()
    def books_are_right(self) -> None:
        cache = self.cache
        cache.check()
        assert cache.num_free_blocks + cache.num_cached_blocks + cache.num_used_blocks == BLOCKS
        assert cache.num_used_blocks == len({block for owner in self.owners for block in owner.table.blocks})
        assert len(cache.offloaded) <= self.tier.capacity
        resident, offloaded = [], []
        for node in _below(cache._tree.root):
            (offloaded if cache.offloaded.has(node) else resident).append(node)
            assert node.parent is not None
            assert not cache.offloaded.has(node.parent) or cache.offloaded.has(node), "a prefix has a gap"
            assert node.children_on_device == sum(not cache.offloaded.has(child) for child in node.children)
        assert {node.block_id: node for node in resident} == cache._nodes
        assert {node.block_id: node for node in offloaded} == cache.offloaded._nodes
        idle = [node for node in resident if not node.children_on_device and not cache._references[node.block_id]]
        assert len(cache._evictable) == len(idle)
        assert len(cache.offloaded._queue) == sum(not node.children for node in offloaded)

    @invariant()
    def contents_are_right(self) -> None:
        """What was copied and not yet made is made up for first; it changes nothing else."""
        self.make_copies()
        for node in _below(self.cache._tree.root):
            assert self.content[node.block_id] == list(node.tokens)

    def teardown(self) -> None:
        for owner in self.owners:
            self.cache.free(owner.table)
        assert self.cache.num_used_blocks == self.cache.num_reserved_blocks == 0
        assert self.cache.grow(BlockTable([], 0, 0), BLOCKS * SIZE), "every block can be had again"


def _below(node: Node) -> list[Node]:
    return [one for child in node.children for one in (child, *_below(child))]


TestOffloadMachine = pytest.mark.proof(OffloadMachine.TestCase)
TestOffloadMachine.settings = settings(max_examples=examples(3), stateful_step_count=40)


def _filled(cache: KvCacheManager, *prompts: list[int]) -> None:
    for prompt in prompts:
        cache.free(fill(cache, prompt))
        cache.take_copies()


def test_evicted_blocks_come_back() -> None:
    cache = KvCacheManager(4, 2, offload_pool=Tier(4))
    _filled(cache, [1, 1, 2, 2, 3, 3], [7, 7, 8, 8, 9, 9])
    assert (len(cache.offloaded), cache.counts.offloaded_tokens, cache.counts.evictions) == (2, 4, 0)
    table = cache.allocate([1, 1, 2, 2, 3, 3, 4], 7)
    assert table is not None
    assert (table.cached_tokens, table.reused_blocks, cache.counts.restored_tokens) == (6, 1, 4)
    sources = [copy.source for copy in cache.take_copies() if copy.source >= 4]
    assert len(sources) == 2
    cache.commit(table, [1, 1, 2, 2, 3, 3, 4], 7)
    assert not any(cache.offloaded.has(node) for node in cache._nodes.values())


def test_the_second_tier_forgets_in_the_policys_order() -> None:
    cache = KvCacheManager(2, 2, offload_pool=Tier(2))
    _filled(cache, [1, 1], [2, 2], [3, 3], [4, 4], [5, 5])
    assert cache.counts.evictions == 1
    assert sorted(node.tokens for node in cache.offloaded._nodes.values()) == [(2, 2), (3, 3)]


@pytest.mark.parametrize(
    ("restoring", "computing", "pays"), [(0.05, 0.01, True), (0.2, 0.01, False), (None, 0.01, True), (1, None, True)]
)
def test_restoring_pays_where_a_token_is_faster(restoring: float | None, computing: float | None, pays: bool) -> None:
    rule_of_cost = RestoreRule(None)
    if restoring is not None:
        rule_of_cost.observe_restore(1000, restoring)
    if computing is not None:
        rule_of_cost.observe_compute(100, computing)
    assert rule_of_cost.decide(100) is pays


def test_a_verdict_against_restoring_wears_off() -> None:
    """Restoring was slow once, and is never measured while it is not done."""
    rule_of_cost = RestoreRule(None)
    rule_of_cost.observe_restore(100, 0.02)
    rule_of_cost.observe_compute(100, 0.01)
    refused = next(count for count in range(1000) if rule_of_cost.decide(1))
    assert 50 < refused < 100  # 0.99 ** 69 is one half


def test_a_set_length_decides_alone() -> None:
    rule_of_cost = RestoreRule(64)
    rule_of_cost.observe_restore(100, 9.0)
    rule_of_cost.observe_compute(100, 0.1)
    assert [rule_of_cost.decide(tokens) for tokens in (63, 64)] == [False, True]


def test_a_held_block_is_not_evicted_when_its_last_child_is() -> None:
    """The pool is full: the first node takes the child's block, the second the first's; neither the parent's."""
    tree, counts = PrefixTree(), CacheCounts()
    offloaded = OffloadedBlocks(tree, Tier(2), 4, EvictionQueue(POLICIES["lru"]), counts)  # type: ignore[arg-type]
    parent = tree.add(tree.root, (1, 1), 0)
    child = tree.add(parent, (2, 2), 1)
    first, second = (tree.add(tree.root, (token, token), token) for token in (7, 8))
    assert offloaded.put(child) is not None
    assert offloaded.put(parent) is not None
    with offloaded.holding(parent):
        assert offloaded.put(first) is not None
        assert offloaded.put(second) is not None
        assert (offloaded.has(parent), counts.evictions) == (True, 2)
        assert tree.child(tree.root, (7, 7)) is None
    assert len(offloaded._queue) == 2
