"""Eviction policies and retention: what is forgotten first."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.eviction import POLICIES, EvictionQueue
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.kvcache.prefix_tree import DEFAULT_PRIORITY, Node, PrefixTree
from inflight.engine.kvcache.retention import RetentionRange, retention_of
from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.settings.deployment import LimitSettings
from inflight.triton.request_reader import read_request
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, fill, load, run
from tests.support.properties import examples


def _use(cache: KvCacheManager, *prompts: list[int], **retention: Any) -> None:
    for prompt in prompts:
        table = cache.allocate(prompt, len(prompt), **retention)
        assert table is not None
        assert cache.grow(table, len(prompt))
        cache.commit(table, prompt, len(prompt))
        cache.free(table)


def _left(cache: KvCacheManager, wanted: int) -> set[tuple[int, ...]]:
    """Take so many blocks and return what is left."""
    assert cache.grow(BlockTable([], 0, 0), wanted * cache.block_size)
    return {node.tokens for node in cache._nodes.values()}


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        ("lru", {(4, 4), (5, 5)}),  # the newest
        ("lfu", {(1, 1), (2, 2)}),  # (1, 1) four times, (2, 2) twice, the others once
        ("prefix", {(1, 1), (2, 2)}),
    ],
)
def test_eviction_policies(policy: str, left: set[tuple[int, ...]]) -> None:
    cache = KvCacheManager(6, 2, eviction=policy)
    _use(cache, *[[1, 1, 9]] * 4, *[[2, 2, 9]] * 2, [3, 3, 9], [4, 4, 9], [5, 5, 9])
    assert _left(cache, 4) == left


def test_a_shared_prefix_outlives_turnovers_but_not_for_ever() -> None:
    """16 sequences shared it: it stays for four turnovers of private blocks; lfu keeps it for good, lru not at all."""
    survived = {}
    for policy in POLICIES:
        cache = KvCacheManager(8, 2, eviction=policy)
        _use(cache, *[[1, 1, 9]] * 16)
        turns = 0
        while (1, 1) in {node.tokens for node in cache._nodes.values()} and turns < 100:
            _use(cache, *([100 + turns * 8 + block, 0, 9] for block in range(8)))
            turns += 1
        survived[policy] = turns
    assert survived["lru"] == 1
    assert 4 <= survived["prefix"] <= 7
    assert survived["lfu"] == 100


def test_policies_on_a_skewed_trace() -> None:
    """Few prompts that many ask, among many that one asks: frequency and sharing beat recency."""
    chance = random.Random(3)
    popular = [[chance.randrange(9) for _ in range(8)] for _ in range(12)]
    trace = [
        popular[min(int(chance.paretovariate(0.9)) - 1, 11)] if chance.random() < 0.4 else [50 + step] * 9
        for step in range(1500)
    ]
    cached = {}
    for policy in POLICIES:
        cache, hits = KvCacheManager(40, 2, eviction=policy), 0
        for prompt in trace:
            table = cache.allocate(prompt, len(prompt))
            assert table is not None
            hits += table.cached_tokens
            assert cache.grow(table, len(prompt))
            cache.commit(table, prompt, len(prompt))
            cache.free(table)
        cached[policy] = hits
    assert cached["prefix"] > 1.1 * cached["lru"]
    assert cached["lfu"] > 1.1 * cached["lru"]


Leaf = st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([10, 35, 90]), st.sampled_from([None, 5]))
Actions = st.lists(st.tuples(st.sampled_from(["offer", "withdraw", "pop"]), st.integers(0, 2), st.integers(0, 99)))


@settings(max_examples=examples(3))
@given(leaves=st.lists(Leaf, max_size=12), actions=Actions, policy=st.sampled_from(sorted(POLICIES)))
def test_the_queue_is_a_sorted_list(
    leaves: list[tuple[int, int, int, int | None]], actions: list[tuple[str, int, int]], policy: str
) -> None:
    """Against a list that is searched: lower priority first, expired ones at the default, then the policy's rank."""
    now = [0]
    rank, age = POLICIES[policy], 0.0
    queue = EvictionQueue(rank, lambda: now[0])
    nodes = [
        Node((place,), None, place, last_used=used, uses=uses, priority=priority, expires_ns=expires)
        for place, (used, uses, priority, expires) in enumerate(leaves)
    ]
    offered: list[tuple[Node, float]] = []

    def key(entry: tuple[Node, float]) -> tuple[float, float, int]:
        return entry[0].priority, entry[1], entry[0].last_used

    for action, passed, index in actions:
        now[0] += passed
        if action == "offer" and nodes:
            queue.offer(nodes[-1])
            offered.append((nodes[-1], rank(nodes[-1], age)))
            nodes.pop()
        elif action == "withdraw" and offered:
            queue.withdraw(offered.pop(index % len(offered))[0])
        elif action == "pop" and offered:
            late = [entry[0] for entry in offered if entry[0].expires_ns is not None and entry[0].expires_ns <= now[0]]
            node = queue.pop()
            assert all((one.priority, one.expires_ns) == (35, None) for one in late)
            offered = [(one, rank(one, age) if one in late else own) for one, own in offered]
            [popped] = [entry for entry in offered if entry[0] is node]
            assert key(popped) == min(map(key, offered))
            offered.remove(popped)
            age = max(age, popped[1])
        assert len(queue) == len(offered)


def test_what_was_popped_long_before_its_retention_ends_is_forgotten() -> None:
    queue = EvictionQueue(POLICIES["lru"], lambda: 0)
    for place in range(1000):
        queue.offer(Node((place,), None, place, expires_ns=10**18))
        queue.pop()
    assert len(queue._expiring) <= 65


def test_places_that_expired_retention_has_left_are_forgotten() -> None:
    """Blocks of a high priority expire before they are evicted, and others of the default priority go before them."""
    now = [0]
    queue = EvictionQueue(POLICIES["lru"], lambda: now[0])
    for place in range(1000):
        queue.offer(Node((place,), None, place, priority=90, expires_ns=now[0] + 1))
        now[0] += 2
        if place >= 20:
            queue.pop()
    assert len(queue) == 20
    assert len(queue._heap) <= 2 * 20 + 65


def test_a_leaf_that_went_to_another_queue_is_gone_from_the_first() -> None:
    first, second = (EvictionQueue(POLICIES["lru"]) for _ in range(2))
    moved, stays = Node((1,), None, 1, last_used=1), Node((2,), None, 2, last_used=2)
    first.offer(moved)
    first.withdraw(moved)
    second.offer(moved)
    first.offer(stays)
    assert first.pop() is stays
    assert second.pop() is moved


@settings(max_examples=examples(3))
@given(
    blocks=st.sets(st.tuples(*[st.integers(0, 2)] * 4), max_size=30),
    tokens=st.lists(st.integers(0, 2), max_size=4).map(tuple),
)
def test_longest_common_finds_the_sibling(blocks: set[tuple[int, ...]], tokens: tuple[int, ...]) -> None:
    tree = PrefixTree()
    for place, block in enumerate(blocks):
        tree.add(tree.root, block, place)
    node, common = tree.longest_common(tree.root, tokens)

    def alike(block: tuple[int, ...]) -> int:
        return next(
            (index for index, pair in enumerate(zip(block, tokens, strict=False)) if len(set(pair)) > 1), len(tokens)
        )

    assert common == max(map(alike, blocks), default=0)
    assert (node is None) == (common == 0)
    assert node is None or alike(node.tokens) == common
    for block in blocks:
        found = tree.child(tree.root, block)
        assert found is not None
        assert found.tokens == block


def test_retention_outranks_the_policy() -> None:
    cache = KvCacheManager(4, 2)
    _use(cache, [1, 1, 2, 2], retention=(RetentionRange(0, None, 80, None),))
    _use(cache, [3, 3], retention=(RetentionRange(0, None, 5, None),))
    _use(cache, [4, 4])
    assert _left(cache, 1) == {(1, 1), (2, 2), (4, 4)}, "the lowest priority, though used after the first"
    _use(cache, [1, 1, 2, 2])  # says nothing of retention, and changes nothing
    assert _left(cache, 1) == {(1, 1), (2, 2)}


def test_a_block_belongs_to_the_range_of_its_first_token() -> None:
    """And a prefix outlives what is worth keeping behind it, whatever its own priority."""
    cache = KvCacheManager(4, 2)
    ranges = (RetentionRange(0, 3, 10, None), RetentionRange(3, None, 90, None))
    _use(cache, [1, 1, 2, 2, 3, 3], [7, 7], retention=ranges)
    priorities = {node.tokens: node.priority for node in cache._nodes.values()}
    assert priorities == {(1, 1): 10, (2, 2): 10, (3, 3): 90, (7, 7): 10}
    assert _left(cache, 1) == {(1, 1), (2, 2), (3, 3)}
    assert _left(cache, 1) == {(1, 1), (2, 2)}, "only leaves go: the only one had the highest priority"


def test_a_range_ends_before_its_end() -> None:
    """The block that begins at ``end`` is not in the range, where no other range follows."""
    cache = KvCacheManager(2, 2)
    _use(cache, [1, 1, 2, 2], retention=(RetentionRange(0, 2, 90, None),))
    assert {node.tokens: node.priority for node in cache._nodes.values()} == {(1, 1): 90, (2, 2): DEFAULT_PRIORITY}


def test_retention_expires() -> None:
    now = 0
    cache = KvCacheManager(3, 2, now_ns=lambda: now)
    _use(cache, [1, 1], retention=(RetentionRange(0, None, 90, 10),))
    _use(cache, [2, 2], [3, 3])
    now = 9_999_999
    assert _left(cache, 1) == {(1, 1), (3, 3)}
    now = 10_000_000
    assert _left(cache, 1) == {(3, 3)}, "its time is over, and it is the least recently used"


NAMES = [f"retention_token_range_{name}" for name in ("starts", "ends", "priorities", "durations_ms")]
DECODE = ["retention_decode_priority", "retention_decode_duration_ms"]


def _read(engine: str = "pytorch", **values: list[int]) -> tuple[RetentionRange, ...]:
    arrays = {"input_ids": np.arange(8)[None], "request_output_len": np.array([[4]])}
    arrays |= {name: np.array([given], np.int32) for name, given in values.items()}
    _, [part] = read_request(arrays, "", LimitSettings(), 100, True, engine, max_sequences=256)
    return part.request.retention


def test_the_contracts_tensors() -> None:
    assert _read() == ()
    ranges = _read(**dict(zip(NAMES, ([0, 4], [4, -1], [90, 20], [500, -1]), strict=True)))
    assert ranges == (RetentionRange(0, 4, 90, 500), RetentionRange(4, 8, 20, None))
    assert _read(**{NAMES[0]: [2], NAMES[2]: [7]}) == (RetentionRange(2, 8, 7, None),)
    assert _read(**{DECODE[0]: [60], DECODE[1]: [9]}) == (RetentionRange(8, None, 60, 9),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({NAMES[0]: [0]}, "priorities has 0 elements; it must have as many as retention_token_range_starts (1)"),
        ({NAMES[0]: [0], NAMES[2]: [5], NAMES[1]: [1, 2]}, "ends has 2 elements"),
        ({NAMES[0]: [4], NAMES[1]: [4], NAMES[2]: [5]}, "retention_token_range_ends is 4; it must be above its start"),
        (
            {NAMES[0]: [0, 3], NAMES[1]: [4, 6], NAMES[2]: [5, 5]},
            "range_starts is 3; it must be at least 4",
        ),
        ({NAMES[0]: [0, 3], NAMES[1]: [-1, 6], NAMES[2]: [5, 5]}, "ends has -1, open, before its last element"),
        ({NAMES[0]: [-1], NAMES[2]: [5]}, "retention_token_range_starts is -1; it must be at least 0"),
        ({NAMES[0]: [0], NAMES[2]: [101]}, "retention_token_range_priorities is 101; it must be between 0 and 100"),
        (
            {NAMES[0]: [0], NAMES[2]: [5], NAMES[3]: [0]},
            "range_durations_ms is 0; it must be at least 1",
        ),
        ({DECODE[0]: [-1]}, "retention_decode_priority is -1; it must be between 0 and 100"),
        ({DECODE[1]: [5]}, "retention_decode_duration_ms is given without retention_decode_priority"),
    ],
)
def test_wrong_retention_is_refused(values: dict[str, list[int]], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        _read(**values)
    assert message in str(error.value)


def test_an_engine_without_retention_refuses_it() -> None:
    with pytest.raises(UnsupportedFeature, match="retention_decode_priority is not supported by this engine"):
        _read("replay", **{DECODE[0]: [60]})
    assert _read("trtllm", **{DECODE[0]: [60]}) == (RetentionRange(8, None, 60, None),)


def test_retention_through_the_engine() -> None:
    """What is worth more is found again, though twice as much has been asked since; generated tokens are worth less."""
    kept, prompt = [5] * 16, tuple([5] * 16)
    engine = load(checkpoint("llama"), num_blocks=12)
    request = ask(kept, 8)
    request.retention = retention_of([0], [-1], [80], [], 1, None, len(kept))
    assert run(engine, [request])[request.key].tokens == greedy("llama", prompt, 8)
    for first in range(20, 26):
        run(engine, [ask([first] * 16, 8)])
    again = ask([*kept, 6], 2)
    output = run(engine, [again])[again.key]
    assert output.tokens == greedy("llama", (*prompt, 6), 2)
    assert output.metrics is not None
    assert output.metrics.cached_tokens == 16
    off = load(checkpoint("llama"), num_blocks=12, prefix_reuse=False)
    with pytest.raises(UnsupportedFeature, match="retention_.* is not supported by this deployment"):
        off.validate(request)


def test_opening_does_not_search_all_prompts() -> None:
    """Two thousand distinct prompts, all alike in their first token: few of them are looked at."""
    looked = 0

    class Counted(tuple[int, ...]):
        def __lt__(self, other: Any) -> bool:
            nonlocal looked
            looked += 1
            return super().__lt__(other)

    cache = KvCacheManager(4_000, 4)
    for first in range(2_000):
        cache.free(fill(cache, [1, *divmod(first, 40), 0]))
    for node in cache._tree.root.children:
        node.tokens = Counted(node.tokens)
    table = cache.allocate([1, 30, 30, 9, 9], 5)
    assert table is not None
    assert table.cached_tokens == 3
    assert 0 < looked < 50
