"""The books of the second tier: which blocks, evicted from the cache, lie in which of its pages, and what returns.

A page holds what a block holds. The tier's memory itself is ``tier``'s; here it is a number of pages that may be gone.
"""

from __future__ import annotations

from typing import Protocol

from inflight.engine.kv.blocks import CacheCounts
from inflight.engine.kv.eviction import EvictionQueue
from inflight.engine.kv.prefix_tree import Node, PrefixTree

_DECAY = 0.9
"""Of what was measured, with each new measurement: some ten of them count."""
_FORGETTING = 0.99


class SecondTier(Protocol):
    """Memory for blocks that leave the cache."""

    @property
    def pages(self) -> int:
        """How many blocks it holds."""

    def usable(self) -> bool:
        """Whether it still is what it was at the start; once it is not, never again."""

    def pays(self, tokens: int) -> bool:
        """Whether to restore so many tokens rather than to compute them again."""


class RestoreRule:
    """Restoring pays where it takes less time than computing, by what both have taken lately; or from a set length."""

    def __init__(self, min_tokens: int | None) -> None:
        """
        Args:
            min_tokens: restore from so many on, whatever it takes; None: by measurement.
        """
        self._min_tokens = min_tokens
        self._compute, self._restore = _Speed(), _Speed()

    def computed(self, tokens: int, seconds: float) -> None:
        """Learn that computing so many tokens of prompts took so long."""
        self._compute.add(tokens, seconds)

    def restored(self, tokens: int, seconds: float) -> None:
        """Learn that restoring so many took so long."""
        self._restore.add(tokens, seconds)

    def pays(self, tokens: int) -> bool:
        """Return the verdict; until both have been measured it is to restore, since that is how it is measured.

        A verdict against restoring wears off, since it keeps itself from being measured again.
        """
        if self._min_tokens is not None:
            return tokens >= self._min_tokens
        restoring, computing = self._restore.seconds_per_token, self._compute.seconds_per_token
        if restoring is None or computing is None or restoring < computing:
            return True
        self._restore.seconds *= _FORGETTING
        return False


class _Speed:
    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def seconds_per_token(self) -> float | None:
        return self.seconds / self.tokens if self.tokens else None


class OffloadedBlocks:
    """Which nodes lie in which pages. Pages are numbered on from the cache's blocks, so that a place is one number."""

    def __init__(
        self, tree: PrefixTree, tier: SecondTier | None, num_blocks: int, queue: EvictionQueue, counts: CacheCounts
    ) -> None:
        """
        Args:
            tree: the prefix index.
            tier: None: there is none.
            num_blocks: of the cache.
            queue: for leaves in the tier.
            counts: where evictions are counted.
        """
        self._counts = counts
        self._tree, self._tier, self._queue = tree, tier, queue
        self._first = num_blocks
        self._end = num_blocks + (tier.pages if tier else 0)
        self._free = list(range(self._end - 1, num_blocks - 1, -1))
        self._nodes: dict[int, Node] = {}
        """By page."""
        self._held: Node | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def pages(self) -> int:
        """How many blocks can lie here; 0 once the tier has gone."""
        return self._end - self._first

    def has(self, node: Node) -> bool:
        """Whether a node's contents are here."""
        return node.place >= self._first

    def poll(self) -> None:
        """Where the tier has gone, forget it and what lay in it."""
        if self._tier is not None and not self._tier.usable():
            self.clear()
            self._tier, self._free, self._end = None, [], self._first

    def can_restore(self, tokens: int) -> bool:
        """Whether to restore so many tokens."""
        return self._tier is not None and self._tier.pays(tokens)

    def put(self, node: Node) -> int | None:
        """Give a node that leaves the cache a page, at the cost of the leaf that goes first; None: there is none."""
        if not self._free:
            if not len(self._queue):
                return None
            self._forget(self._queue.pop())
        page = self._free.pop()
        node.place = page
        self._nodes[page] = node
        self._offer_leaf(node)
        return page

    def take_back(self, node: Node, block: int) -> None:
        """Note that a node has a block again, and free its page."""
        self._queue.withdraw(node)
        del self._nodes[node.place]
        self._free.append(node.place)
        node.place = block

    def hold(self, node: Node) -> None:
        """Keep a node, and so what comes before it, from being given up, until ``let_go``."""
        self._held = node
        self._queue.withdraw(node)

    def let_go(self) -> None:
        """The end of ``hold``."""
        held, self._held = self._held, None
        assert held is not None
        self._offer_leaf(held)

    def clear(self) -> None:
        """Forget all that lies here."""
        for page, node in self._nodes.items():
            self._queue.withdraw(node)
            node.children.clear()
            self._free.append(page)
        for node in self._nodes.values():
            assert node.parent is not None
            if not self.has(node.parent):
                self._tree.remove(node)
        self._nodes.clear()

    def check_counts(self) -> None:
        """Check that no page is lost, in constant time.

        Raises:
            AssertionError: one is.
        """
        assert len(self._free) + len(self._nodes) == self.pages, "pages are lost"

    def check(self) -> None:
        """Check the books page by page.

        Raises:
            AssertionError: they are wrong.
        """
        assert not set(self._free) & self._nodes.keys(), "a free page is in use"

    def _offer_leaf(self, node: Node) -> None:
        if not node.children and node is not self._held:
            self._queue.offer(node)

    def _forget(self, leaf: Node) -> None:
        self._tree.remove(leaf)
        self._free.append(leaf.place)
        del self._nodes[leaf.place]
        self._counts.evictions += 1
        above = leaf.parent
        assert above is not None
        if self.has(above):
            self._offer_leaf(above)
