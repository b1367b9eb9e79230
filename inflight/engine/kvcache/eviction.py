"""Which cached block is evicted first. Only leaves are: a prefix without its beginning is of no use.

A policy ranks a leaf when the last sequence gives it back; the queue orders leaves by retention priority, then by rank.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable

from inflight.engine.kvcache.prefix_tree import DEFAULT_PRIORITY, Node

Policy = Callable[[Node, float], float]
"""Returns the rank of a leaf that becomes idle now; the second argument is the highest rank evicted so far."""


def prefix_aware(node: Node, age: float) -> float:
    """Rank by how many sequences shared the prefix, with age: a prefix is worth 1 + log2 of them, on top of ``age``.

    This is GreedyDual (Young, Algorithmica 11, 1994) with sharing as the cost. A private tail goes after one turnover
    of the cache; a prefix that 2**n sequences shared outlives n turnovers more without any use, but not for ever.
    """
    return age + 1 + math.log2(node.uses)


POLICIES: dict[str, Policy] = {
    "lru": lambda node, _: node.last_used,  # the leaf whose last use is the longest ago goes first
    "lfu": lambda node, _: node.uses,  # the leaf that the fewest sequences have used goes first
    "prefix": prefix_aware,
}
"""By ``kv_cache.eviction`` of the deployment. The smallest rank is evicted first; of equal ones the longest unused."""


_tickets = itertools.count(1)
"""Numbers for entries of all queues: when a leaf moves to another queue, its old entry must not look valid."""


class EvictionQueue:
    """Idle leaves in the order of eviction. It is a heap; entries of leaves that are used again are skipped."""

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
        """Enter a leaf that no sequence uses now."""
        assert not node.ticket
        if node.expires_ns is not None and node.expires_ns <= self._now_ns():
            node.priority, node.expires_ns = DEFAULT_PRIORITY, None
        self._size += 1
        self._push(node)

    def withdraw(self, node: Node) -> None:
        """Remove a leaf, if it is there: a sequence uses it again, or it is no leaf any more."""
        if node.ticket:
            node.ticket = 0
            self._size -= 1
            if len(self._heap) > 2 * self._size + 64:
                self._compact()

    def pop(self) -> Node:
        """Remove and return the leaf to evict; there must be one."""
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
        heapq.heappush(self._heap, (node.priority, rank, node.last_used, node.ticket, node))
        if node.expires_ns is not None:
            if len(self._expiring) > 2 * self._size + 64:
                self._compact()
            heapq.heappush(self._expiring, (node.expires_ns, node.ticket, node))

    def _expire(self) -> None:
        """Queue the leaves whose retention has run out again, with the default priority."""
        while self._expiring and self._expiring[0][0] <= self._now_ns():
            _, ticket, node = heapq.heappop(self._expiring)
            if node.ticket == ticket:
                node.priority, node.expires_ns = DEFAULT_PRIORITY, None
                self._push(node)

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if entry[4].ticket == entry[3]]
        self._expiring = [entry for entry in self._expiring if entry[2].ticket == entry[1]]
        heapq.heapify(self._heap)
        heapq.heapify(self._expiring)
