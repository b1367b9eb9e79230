"""The paged KV cache's books: which block belongs to whom. It knows block numbers, not tensors.

A block holds the keys and values of ``block_size`` tokens. Full blocks are entered in a prefix index, a tree of blocks:
the key of a block is its parent's node and its own tokens, so that equal keys mean equal prefixes, exactly, without
hash collisions. A block that nobody uses stays cached until its room is needed; then the least recently used leaf goes
first, because a prefix without its beginning is of no use.

Every block is in exactly one of three states: free (no content), used (referenced by a sequence), cached (indexed, not
referenced). free + cached + used == total, always.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_ROOT = 0


class BlockCopy(NamedTuple):
    """Copy-on-write: the whole block ``source`` is to be copied into ``target`` before the next step runs."""

    source: int
    target: int


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    blocks: list[int]
    cached_tokens: int
    """Tokens whose keys and values were there already when the sequence was admitted."""
    reused_blocks: int
    reserved: int = 0
    """Blocks that this sequence may still take and nobody else."""
    new_blocks: int = 0
    indexed: int = 0
    """How many of ``blocks`` are in the prefix index."""
    parent: int = _ROOT
    """The node of the last of them."""


@dataclass(slots=True)
class _Node:
    uid: int
    parent: int
    tokens: tuple[int, ...]
    children: set[int] = field(default_factory=set)
    """Blocks."""
    last_used: int = 0


class KvCache:
    """Block pool with reference counts, reservations and the prefix index."""

    def __init__(self, num_blocks: int, block_size: int, prefix_reuse: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_reuse = prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._nodes: dict[int, _Node] = {}
        """By block."""
        self._blocks: dict[int, int] = {}
        """Block by node uid."""
        self._index: dict[tuple[int, tuple[int, ...]], int] = {}
        self._roots: set[int] = set()
        self._leaves: list[tuple[int, int, int]] = []
        """Heap of (last_used, uid, block) of cached leaves; stale entries are skipped when they come up."""
        self._cached = 0
        self._reserved = 0
        self._clock = 0
        self._uids = _ROOT
        self._copies: list[BlockCopy] = []

    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks that only the prefix index holds; they can be had."""
        return self._cached

    @property
    def used_blocks(self) -> int:
        """Blocks of running sequences."""
        return self.num_blocks - len(self._free) - self._cached

    @property
    def reserved_blocks(self) -> int:
        """Blocks promised to running sequences that have not taken them yet."""
        return self._reserved

    def open(self, tokens: Sequence[int], capacity: int, reuse: bool = True) -> BlockTable | None:
        """Admit a sequence: share the blocks of its longest known prefix, and reserve room.

        The last token is never taken from the cache: it must be computed to give logits.

        Args:
            tokens: the sequence's tokens so far.
            capacity: tokens to reserve room for, shared blocks included.
            reuse: False: take nothing from the cache.

        Returns:
            The sequence's table, or None when there is not enough room now.
        """
        shared, parent = self._match(tokens) if reuse and self._prefix_reuse else ([], _ROOT)
        needed = max(0, self.blocks_for(capacity) - len(shared))
        available = len(self._free) + self._cached - self._reserved
        if needed > available - sum(self._references[block] == 0 for block in shared):
            return None
        for block in shared:
            self._acquire(block)
        table = BlockTable(shared, len(shared) * self.block_size, len(shared), needed, 0, len(shared), parent)
        self._reserved += needed
        if reuse and self._prefix_reuse and needed:
            self._copy_partial_block(table, tokens)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a sequence the blocks to hold ``num_tokens``; False when there are none (what was given stays)."""
        while len(table.blocks) * self.block_size < num_tokens:
            if not table.reserved and len(self._free) + self._cached <= self._reserved:
                return False
            self._take(table)
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Enter the blocks that are full now into the prefix index.

        Where the index already has an equal block, the sequence takes that one and gives its own back.
        """
        if not self._prefix_reuse:
            return
        size = self.block_size
        for position in range(table.indexed, computed // size):
            key = (table.parent, tuple(tokens[position * size : (position + 1) * size]))
            block = table.blocks[position]
            known = self._index.get(key)
            if known is None:
                self._enter(block, key)
            elif known != block:
                self._acquire(known)
                table.blocks[position] = known
                self._release(block)
            table.parent = self._nodes[table.blocks[position]].uid
            table.indexed = position + 1

    def close(self, table: BlockTable) -> None:
        """Give a sequence's blocks back."""
        self._clock += 1
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks = []
        self._reserved -= table.reserved
        table.reserved = 0

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make before the next step runs, once."""
        copies, self._copies = self._copies, []
        return copies

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def check(self) -> None:
        """Check the books against each other.

        Raises:
            AssertionError: they are wrong; a fault of this module or of its user.
        """
        used = sum(count > 0 for count in self._references)
        assert used == self.used_blocks, f"{used} blocks are referenced, {self.used_blocks} are booked as used"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._references[block] for block in self._free), "a free block is referenced"
        assert 0 <= self._reserved <= len(self._free) + self._cached, "more blocks are reserved than there are"

    def _match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Return the blocks of the longest indexed prefix that leaves one token over, and the node of the last."""
        shared: list[int] = []
        parent, size = _ROOT, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            block = self._index.get((parent, tuple(tokens[start : start + size])))
            if block is None:
                break
            shared.append(block)
            parent = self._nodes[block].uid
        return shared, parent

    def _copy_partial_block(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Where an indexed block begins with the next tokens, copy it and go on behind them."""
        rest = tokens[table.cached_tokens : table.cached_tokens + self.block_size]
        limit = min(len(rest), len(tokens) - 1 - table.cached_tokens)
        siblings = self._roots if table.parent == _ROOT else self._nodes[self._blocks[table.parent]].children
        source, common = -1, 0
        for block in siblings:
            length = _common_prefix(self._nodes[block].tokens, rest, limit)
            if length > common:
                source, common = block, length
        if common:
            # The source may be evicted by this very call: copies are made before anything is written.
            self._copies.append(BlockCopy(source, self._take(table)))
            table.cached_tokens += common

    def _take(self, table: BlockTable) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        table.blocks.append(block)
        table.new_blocks += 1
        if table.reserved:
            table.reserved -= 1
            self._reserved -= 1
        return block

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            self._cached -= 1
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
            return
        self._cached += 1
        node.last_used = self._clock
        self._offer(block, node)

    def _offer(self, block: int, node: _Node) -> None:
        if node.children:
            return
        if len(self._leaves) > 2 * self.num_blocks:
            self._leaves = [entry for entry in self._leaves if self._can_go(*entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, node.uid, block))

    def _can_go(self, last_used: int, uid: int, block: int) -> bool:
        """Whether an entry of ``_leaves`` is not stale."""
        node = self._nodes.get(block)
        if node is None or node.uid != uid or node.last_used != last_used:
            return False
        return not self._references[block] and not node.children

    def _enter(self, block: int, key: tuple[int, tuple[int, ...]]) -> None:
        self._uids += 1
        parent, tokens = key
        self._nodes[block] = _Node(self._uids, parent, tokens)
        self._blocks[self._uids] = block
        self._index[key] = block
        (self._roots if parent == _ROOT else self._nodes[self._blocks[parent]].children).add(block)

    def _evict(self) -> int:
        """Forget the least recently used cached leaf and return its block."""
        last_used, uid, block = heapq.heappop(self._leaves)
        while not self._can_go(last_used, uid, block):
            last_used, uid, block = heapq.heappop(self._leaves)
        node = self._nodes[block]
        del self._nodes[block], self._blocks[uid], self._index[node.parent, node.tokens]
        self._cached -= 1
        if node.parent == _ROOT:
            self._roots.discard(block)
        else:
            above = self._blocks[node.parent]
            self._nodes[above].children.discard(block)
            if not self._references[above]:
                self._offer(above, self._nodes[above])
        return block


def _common_prefix(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    length = 0
    while length < limit and first[length] == second[length]:
        length += 1
    return length
