"""Forks of block tables: each holds what it should whoever writes, and no block is lost or held twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from tests.engine.support.driving import held

SIZE = 4


class Owner:
    """A sequence and the table of what it has computed."""

    def __init__(self, tokens: list[int], table: BlockTable) -> None:
        self.tokens, self.table = tokens, table


def write(cache: KvCacheManager, content: list[list[int | None]], owners: list[Owner], new: list[int]) -> None:
    """Have each owner compute one token more: first all grow, then copies are made, then all write, as in a step."""
    for owner in owners:
        assert cache.grow(owner.table, len(owner.tokens) + 1)
    copies = cache.take_copies()
    taken = [list(content[copy.source]) for copy in copies]
    for copy, block in zip(copies, taken, strict=True):
        content[copy.target] = block
    for owner, token in zip(owners, new, strict=True):
        place = len(owner.tokens)
        content[owner.table.blocks[place // SIZE]][place % SIZE] = token
        owner.tokens.append(token)
        cache.commit(owner.table, owner.tokens, len(owner.tokens))


def start(cache: KvCacheManager, length: int) -> tuple[list[list[int | None]], list[Owner]]:
    """Return the blocks' content and the owner of a first sequence of so many tokens."""
    table = cache.allocate([0] * (length + 1), 0)
    assert table is not None
    content: list[list[int | None]] = [[None] * SIZE for _ in range(cache.num_blocks)]
    owners = [Owner([], table)]
    for token in range(length):
        write(cache, content, owners, [token])
    return content, owners


def test_a_full_block_stays_shared_and_a_partial_one_is_copied_for_all_but_the_last() -> None:
    cache = KvCacheManager(16, SIZE)
    content, owners = start(cache, 6)
    owners += [Owner([*owners[0].tokens], cache.fork(owners[0].table)) for _ in range(2)]
    assert cache.num_used_blocks == 2
    write(cache, content, owners, [100, 101, 102])
    assert cache.num_used_blocks == 4
    assert len({owner.table.blocks[0] for owner in owners}) == 1
    assert len({owner.table.blocks[1] for owner in owners}) == 3


def test_a_fork_needs_a_block_only_when_it_writes() -> None:
    cache = KvCacheManager(2, SIZE)
    _, [owner] = start(cache, 6)
    fork = cache.fork(owner.table)
    assert not cache.grow(fork, 7), "there is none to copy to"
    cache.free(owner.table)
    assert cache.grow(fork, 7), "it is the only one that holds the block now"
    assert cache.take_copies() == []


def test_what_was_reserved_is_replaced() -> None:
    cache = KvCacheManager(8, SIZE)
    table = cache.allocate([1, 2], 5 * SIZE)
    assert table is not None
    cache.reserve(table, 3)
    assert cache.num_reserved_blocks == 3
    cache.free(table)
    assert cache.num_reserved_blocks == 0


@given(st.data(), st.integers(1, 9), st.booleans())
def test_each_beam_holds_its_own_tokens(data: st.DataObject, length: int, reuse: bool) -> None:
    cache = KvCacheManager(64, SIZE, reuse)
    content, owners = start(cache, length)
    for step in range(data.draw(st.integers(1, 12))):
        parents = data.draw(st.lists(st.sampled_from(owners), min_size=1, max_size=4))
        forks = [Owner([*one.tokens], cache.fork(one.table)) for one in parents]
        for owner in owners:
            cache.free(owner.table)
        owners = forks
        write(cache, content, owners, [1000 * step + place for place in range(len(owners))])
        cache.check()
        for owner in owners:
            assert held(content, owner.table, len(owner.tokens)) == owner.tokens
    for owner in owners:
        cache.free(owner.table)
    cache.check()
    assert cache.num_free_blocks + cache.num_cached_blocks == cache.num_blocks
