"""Which evicted blocks are offloaded, and in which offload slots.

An offload slot holds the contents of one block. ``offload_pool`` is the memory; here it is a number of slots, which may
be lost while serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from inflight.engine.kvcache.blocks import CacheCounts
from inflight.engine.kvcache.eviction import EvictionQueue
from inflight.engine.kvcache.prefix_tree import Node, PrefixTree

if TYPE_CHECKING:  # it needs PyTorch
    from inflight.engine.kvcache.offload_pool import OffloadPool


class OffloadedBlocks:
    """Which nodes are in which offload slots, which are numbered on from the cache's blocks."""

    def __init__(
        self, tree: PrefixTree, pool: OffloadPool | None, num_blocks: int, queue: EvictionQueue, counts: CacheCounts
    ) -> None:
        """``pool``: None: nothing is offloaded; ``queue``: orders the offloaded leaves for eviction."""
        self._counts = counts
        self._tree, self._pool, self._queue = tree, pool, queue
        self._first = num_blocks
        self.num_slots = pool.num_slots if pool else 0
        """How many blocks can be offloaded; 0 once the pool is lost."""
        self._free = list(reversed(range(num_blocks, num_blocks + self.num_slots)))
        self._nodes: dict[int, Node] = {}
        """The offloaded nodes, by slot."""
        self._held: Node | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def has(self, node: Node) -> bool:
        """Whether a node is offloaded."""
        return node.block_id >= self._first

    def poll(self) -> None:
        """If the pool is lost, forget it and what was in it."""
        if self._pool is not None and not self._pool.usable():
            self.clear()
            self._pool, self._free, self.num_slots = None, [], 0

    def can_restore(self, tokens: int) -> bool:
        """Whether there is a pool, and restoring so many tokens pays."""
        return self._pool is not None and self._pool.rule.pays(tokens)

    def put(self, node: Node) -> int | None:
        """Give an evicted node a slot and return it, if need be that of the leaf to evict here; None: there is none."""
        if not self._free:
            if not len(self._queue):
                return None
            self._forget(self._queue.pop())
        slot = self._free.pop()
        node.block_id = slot
        self._nodes[slot] = node
        self._offer_leaf(node)
        return slot

    def take_back(self, node: Node, block: int) -> None:
        """Give a node a block of the cache again, and free its slot."""
        self._queue.withdraw(node)
        del self._nodes[node.block_id]
        self._free.append(node.block_id)
        node.block_id = block

    @contextmanager
    def holding(self, node: Node | None) -> Iterator[None]:
        """Keep a node, and so all nodes before it, from being evicted meanwhile."""
        self._held = node
        if node is not None:
            self._queue.withdraw(node)
        yield
        self._held = None
        if node is not None:
            self._offer_leaf(node)

    def clear(self) -> None:
        """Forget all offloaded blocks."""
        for slot, node in self._nodes.items():
            self._queue.withdraw(node)
            node.children.clear()
            self._free.append(slot)
        for node in self._nodes.values():
            assert node.parent is not None
            if not self.has(node.parent):
                self._tree.remove(node)
        self._nodes.clear()

    def check_counts(self) -> None:
        """Assert that no slot is lost, in constant time."""
        assert len(self._free) + len(self._nodes) == self.num_slots, "slots are lost"

    def check(self) -> None:
        """Assert that no slot is both free and in use."""
        assert not set(self._free) & self._nodes.keys(), "a free slot is in use"

    def _offer_leaf(self, node: Node) -> None:
        if not node.children and node is not self._held:
            self._queue.offer(node)

    def _forget(self, leaf: Node) -> None:
        self._tree.remove(leaf)
        self._free.append(leaf.block_id)
        del self._nodes[leaf.block_id]
        self._counts.evictions += 1
        above = leaf.parent
        assert above is not None
        if self.has(above):
            self._offer_leaf(above)
