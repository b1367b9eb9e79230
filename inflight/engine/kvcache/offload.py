"""The index of offloaded blocks: it says which evicted block is in which offload block.

An offload block holds the contents of one block outside of the device. ``offload_pool`` is the memory of all of them,
which may be lost while serving; here they are only ids.
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
    """Which node is in which offload block; the ids of offload blocks follow those of the cache's blocks."""

    def __init__(
        self, tree: PrefixTree, pool: OffloadPool | None, num_blocks: int, queue: EvictionQueue, counts: CacheCounts
    ) -> None:
        """``pool``: None: nothing is offloaded; ``queue``: orders offloaded nodes without children for eviction."""
        self._counts = counts
        self._tree, self._pool, self._queue = tree, pool, queue
        self._first = num_blocks
        self.capacity = pool.capacity if pool else 0
        """How many offload blocks there are; 0 once the pool is lost."""
        self._free = list(reversed(range(num_blocks, num_blocks + self.capacity)))
        self._nodes: dict[int, Node] = {}
        """The offloaded nodes, by the id of their offload block."""
        self._held: Node | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def has(self, node: Node) -> bool:
        """Whether a node is offloaded."""
        return node.block_id >= self._first

    def drop_lost_pool(self) -> None:
        """If the pool is lost, forget it and all offloaded blocks."""
        if self._pool is not None and not self._pool.check_usable():
            self.clear()
            self._pool, self._free, self.capacity = None, [], 0

    def decide_restore(self, tokens: int) -> bool:
        """Decide whether to restore so many tokens; False if the pool is lost."""
        return self._pool is not None and self._pool.rule.decide(tokens)

    def put(self, node: Node) -> int | None:
        """Give a node that the device evicts an offload block; return its id, or None: the caller must forget ``node``.

        If all offload blocks are taken, the offloaded leaf that goes first is evicted; there may be none.
        """
        if not self._free:
            if not len(self._queue):
                return None
            self._forget(self._queue.pop())
        block = self._free.pop()
        node.block_id = block
        self._nodes[block] = node
        self._offer_leaf(node)
        return block

    def take_back(self, node: Node, block: int) -> None:
        """Give an offloaded node a block on the device, and free its offload block."""
        self._queue.withdraw(node)
        del self._nodes[node.block_id]
        self._free.append(node.block_id)
        node.block_id = block

    @contextmanager
    def holding(self, node: Node | None) -> Iterator[None]:
        """Keep an offloaded node from eviction in a ``with`` block, and so its ancestors, which are no leaves."""
        self._held = node
        if node is not None:
            self._queue.withdraw(node)
        yield
        self._held = None
        if node is not None:
            self._offer_leaf(node)

    def clear(self) -> None:
        """Forget all offloaded blocks."""
        for block, node in self._nodes.items():
            self._queue.withdraw(node)
            node.children.clear()
            self._free.append(block)
        for node in self._nodes.values():
            assert node.parent is not None
            if not self.has(node.parent):
                self._tree.remove(node)
        self._nodes.clear()

    def check_counts(self) -> None:
        """Assert that no offload block is lost, in constant time."""
        assert len(self._free) + len(self._nodes) == self.capacity, "offload blocks are lost"

    def check(self) -> None:
        """Assert that no offload block is both free and in use."""
        assert not set(self._free) & self._nodes.keys(), "a free offload block is in use"

    def _offer_leaf(self, node: Node) -> None:
        if not node.children and node is not self._held:
            self._queue.offer(node)

    def _forget(self, leaf: Node) -> None:
        self._tree.remove(leaf)
        self._free.append(leaf.block_id)
        del self._nodes[leaf.block_id]
        self._counts.evictions += 1
        parent = leaf.parent
        assert parent is not None
        if self.has(parent):
            self._offer_leaf(parent)
