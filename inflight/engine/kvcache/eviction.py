"""Eviction: the order in which blocks that no sequence uses are evicted, from the device or from the offload pool.

A prefix without its beginning is of no use. So a block on the device can be evicted only when no block behind it is on
the device, and an offloaded block only when no block is behind it at all. A policy ranks a block when it becomes
evictable; the queue orders blocks by retention priority, then by rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable

from inflight.engine.kvcache.prefix_tree import DEFAULT_PRIORITY, Node

Policy = Callable[[Node, float], float]
"""Returns the rank of a block that becomes evictable now; the second argument is the highest rank evicted so far."""


def prefix_aware(node: Node, age: float) -> float:
    """Rank by ``age`` plus 1 plus log2 of the number of sequences that used the prefix.

    This is GreedyDual (Young, Algorithmica 11, 1994) with sharing as the cost. A block that one sequence used is
    evicted after one turnover of the cache; one that 2**n sequences used stays n turnovers longer without further use.
    """
    return age + 1 + math.log2(node.uses)


POLICIES: dict[str, Policy] = {
    "lru": lambda node, _: node.last_used,  # the block whose last use is the longest ago goes first
    "lfu": lambda node, _: node.uses,  # the block that the fewest sequences have used goes first
    "prefix": prefix_aware,
}
"""By ``kv_cache.eviction`` of the deployment. The smallest rank is evicted first; of equal ones the longest unused."""

_STALE = 64
"""A heap is cleaned once it has so many more invalid entries than valid ones."""
_tickets = itertools.count(1)
"""Numbers for entries of all queues: when a block moves to another queue, its old entry must not look valid."""


class EvictionQueue:
    """Evictable blocks in the order of eviction: a heap, in which an entry is valid while its node has its ticket."""

    def __init__(self, policy: Policy, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """``now_ns``: the clock by which retention expires."""
        self._policy = policy
        self._now_ns = now_ns
        self._heap: list[tuple[int, float, int, int, Node]] = []
        self._expiring: list[tuple[int, int, Node]] = []
        """Heap of (when, ticket, node)."""
        self._size = 0
        self._age = 0.0

    def __len__(self) -> int:
        return self._size

    def offer(self, node: Node) -> None:
        """Add a block that can be evicted from now on."""
        assert not node.ticket
        if node.expires_ns is not None and node.expires_ns <= self._now_ns():
            node.priority, node.expires_ns = DEFAULT_PRIORITY, None
        self._size += 1
        self._push(node)

    def withdraw(self, node: Node) -> None:
        """Remove a block, if it is there: it cannot be evicted any more."""
        if node.ticket:
            node.ticket = 0
            self._size -= 1
            self._compact()

    def pop(self) -> Node:
        """Remove and return the block to evict; there must be one."""
        self._expire()
        while True:
            _, rank, _, ticket, node = heapq.heappop(self._heap)
            if node.ticket == ticket:
                self._age = max(self._age, rank)
                node.ticket = 0
                self._size -= 1
                return node

    def _push(self, node: Node) -> None:
        node.ticket = next(_tickets)
        rank = self._policy(node, self._age)
        self._compact()
        heapq.heappush(self._heap, (node.priority, rank, node.last_used, node.ticket, node))
        if node.expires_ns is not None:
            heapq.heappush(self._expiring, (node.expires_ns, node.ticket, node))

    def _expire(self) -> None:
        """Give blocks whose retention has expired the default priority, and a new place in the queue."""
        while self._expiring and self._expiring[0][0] <= self._now_ns():
            _, ticket, node = heapq.heappop(self._expiring)
            if node.ticket == ticket:
                node.priority, node.expires_ns = DEFAULT_PRIORITY, None
                self._push(node)

    def _compact(self) -> None:
        """Drop the entries that are not valid, where they are many."""
        if max(len(self._heap), len(self._expiring)) <= 2 * self._size + _STALE:
            return
        self._heap = [entry for entry in self._heap if entry[4].ticket == entry[3]]
        self._expiring = [entry for entry in self._expiring if entry[2].ticket == entry[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiring)
