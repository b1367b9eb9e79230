"""The paged KV cache's books: which block belongs to whom. It knows block numbers, not tensors.

A block holds the keys and values of ``block_size`` tokens. Full blocks are entered in a prefix index
(``kv.prefix_tree``). A block that nobody uses stays cached until its room is needed; which leaf goes first is the
eviction policy's to say (``kv.eviction``). With a second tier (``kv.offload``) what goes lies on there, and comes back
when a sequence begins with it.

Every block is in exactly one of three states: free (no content), used (referenced by a sequence), cached (indexed, not
referenced). free + cached + used == total, always. Blocks in the second tier are none of these: they are counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from inflight.engine.kv.blocks import BlockCopy, Blocks, BlockTable, CacheCounts, PrefixMatch
from inflight.engine.kv.eviction import POLICIES, EvictionQueue
from inflight.engine.kv.offload import OffloadedBlocks, SecondTier
from inflight.engine.kv.prefix_tree import Node, PrefixTree
from inflight.engine.kv.retention import Retention, apply_retention

__all__ = ["BlockCopy", "BlockTable", "CacheCounts", "KvCache", "PrefixMatch"]


class KvCache:
    """Block pool with reference counts, reservations and the prefix index."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        eviction: str = "lru",
        tier: SecondTier | None = None,
        counts: CacheCounts | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """
        Args:
            num_blocks: capacity.
            block_size: tokens per block.
            prefix_reuse: keep blocks for equal prefixes.
            eviction: a name in ``POLICIES``.
            tier: where evicted blocks go; None: nowhere.
            counts: where to count on; None: from nothing.
            now_ns: the clock that retention expires by.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_reuse = prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._tree = PrefixTree()
        self._nodes: dict[int, Node] = {}
        """By block."""
        policy = POLICIES[eviction]
        self.counts = counts or CacheCounts()
        self._idle = EvictionQueue(policy, now_ns)
        """Cached blocks that no cached or used block continues."""
        self.offloaded = OffloadedBlocks(self._tree, tier, num_blocks, EvictionQueue(policy, now_ns), self.counts)
        """The books of the second tier."""
        self._now_ns = now_ns
        self._cached = self._used = self._reserved = 0
        self._clock = 0
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
        return self._used

    @property
    def reserved_blocks(self) -> int:
        """Blocks promised to running sequences that have not taken them yet."""
        return self._reserved

    def open(
        self, tokens: Sequence[int], capacity: int, reuse: bool = True, retention: Retention = ()
    ) -> BlockTable | None:
        """Admit a sequence: share the blocks of its longest known prefix, and reserve room.

        Args:
            tokens: the sequence's tokens so far.
            capacity: tokens to reserve room for, shared blocks included.
            reuse: False: take nothing from the cache.
            retention: what its blocks are worth afterwards.

        Returns:
            The sequence's table, or None when there is not enough room now.
        """
        match = self.match(tokens, reuse)
        return self.admit(match, capacity, retention) if self.has_room(match, capacity) else None

    def match(self, tokens: Sequence[int], reuse: bool = True) -> PrefixMatch:
        """Return what is known of a sequence's tokens, which holds until the cache changes; not ``reuse``: nothing."""
        if not (reuse and self._prefix_reuse):
            return PrefixMatch([], 0, None, 0, 0)
        self.offloaded.poll()
        path, partial, common = self._tree.match(tokens, self.block_size)
        resident = next((index for index, node in enumerate(path) if self.offloaded.has(node)), len(path))
        return PrefixMatch(path, resident, partial, common, len(path) * self.block_size + common)

    def has_room(self, match: PrefixMatch, capacity: int) -> bool:
        """Whether a sequence of which so much is known can be admitted with room for ``capacity`` tokens."""
        available = len(self._free) + self._cached - self._reserved
        idle = sum(self._references[node.place] == 0 for node in match.path[: match.resident])
        return self._needed(match, capacity) <= available - idle

    def admit(self, match: PrefixMatch, capacity: int, retention: Retention = ()) -> BlockTable:
        """Admit a sequence for which ``has_room``: share what is known of it, reserve the rest; return its table."""
        known, needed = match.resident, self._needed(match, capacity)
        for node in match.path[:known]:
            node.uses += 1
            self._acquire(node.place)
        shared, last = Blocks(node.place for node in match.path[:known]), match.path[known - 1] if known else None
        table = BlockTable(shared, known * self.block_size, known, needed, 0, known, last, retention)
        self._reserved += needed
        self._copy_known(table, match)
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

        Where the index already has an equal block, the sequence takes that one and gives its own back; where the index
        has it in the second tier, the sequence's own takes its place.
        """
        size = self.block_size
        if not self._prefix_reuse or computed < (table.indexed + 1) * size:
            return
        for position in range(table.indexed, computed // size):
            content = tuple(tokens[position * size : (position + 1) * size])
            above, block = table.node or self._tree.root, table.blocks[position]
            node = self._tree.child(above, content)
            if node is None:
                node = self._tree.add(above, content, block)
                self._enter(node)
            else:
                node.uses += 1
                if self.offloaded.has(node):
                    self.offloaded.take_back(node, block)
                    self._enter(node)
                elif node.place != block:
                    self._acquire(node.place)
                    table.blocks[position] = node.place
                    self._release(block)
            table.node = node
            table.indexed = position + 1

    def close(self, table: BlockTable) -> None:
        """Give a sequence's blocks back."""
        self._clock += 1
        if table.retention:
            nodes = [self._nodes[block] for block in table.blocks[: table.indexed]]
            apply_retention(table.retention, nodes, self.block_size, self._now_ns())
        if self._copies:  # what was to be copied for a sequence that never ran
            private = {block for block in table.blocks[table.indexed :] if self._references[block] == 1}
            self._copies = [copy for copy in self._copies if copy.target not in private]
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks = Blocks()
        self._reserved -= table.reserved
        table.reserved = 0

    def state(self, block: int) -> str:
        """Return which of the three states a block is in: ``used``, ``cached`` or ``free``."""
        return "used" if self._references[block] else "cached" if block in self._nodes else "free"

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make before the next step runs, once."""
        copies, self._copies = self._copies, []
        return copies

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def check_counts(self) -> None:
        """Check that no block is lost, in constant time.

        Raises:
            AssertionError: one is; a fault of this module or of its user.
        """
        available = len(self._free) + self._cached
        assert available + self._used == self.num_blocks, f"{self.num_blocks - available - self._used} blocks are lost"
        assert 0 <= self._reserved <= available, "more blocks are reserved than there are"
        self.offloaded.check_counts()

    def check(self) -> None:
        """Check all of the books against each other, block by block.

        Raises:
            AssertionError: they are wrong.
        """
        self.check_counts()
        used = sum(count > 0 for count in self._references)
        assert used == self._used, f"{used} blocks are referenced, {self._used} are booked as used"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._references[block] for block in self._free), "a free block is referenced"
        self.offloaded.check()

    def _needed(self, match: PrefixMatch, capacity: int) -> int:
        """Return the blocks to reserve beside those that are shared."""
        return max(self.blocks_for(capacity), len(match.path)) - match.resident

    def _copy_known(self, table: BlockTable, match: PrefixMatch) -> None:
        """Have copied what is known behind the shared blocks: from the second tier, then the beginning of a block."""
        size, offloaded = self.block_size, match.path[match.resident :]
        partial, common = (match.partial, match.common) if table.reserved > len(offloaded) else (None, 0)
        restorable = [node for node in (*offloaded, partial) if node is not None and self.offloaded.has(node)]
        deepest = restorable[-1] if restorable else None
        restored = len(offloaded) * size + (common if deepest is partial else 0)
        if deepest is not None and not self.offloaded.can_restore(restored):
            return
        if deepest is not None:
            self.offloaded.hold(deepest)
            self.counts.restored_tokens += restored
        wanted = offloaded if partial is None else [*offloaded, partial]
        # A block that begins alike may be evicted by this very call: it is read before anything is written.
        copies = [BlockCopy(node.place, self._take(table)) for node in wanted]
        if deepest is not None:
            self.offloaded.let_go()
        self._copies += copies
        table.cached_tokens = len(match.path) * size + common

    def _take(self, table: BlockTable) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        self._used += 1
        table.blocks.append(block)
        table.new_blocks += 1
        if table.reserved:
            table.reserved -= 1
            self._reserved -= 1
        return block

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            self._cached -= 1
            self._used += 1
            self._idle.withdraw(self._nodes[block])
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self._used -= 1
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
            return
        self._cached += 1
        node.last_used = self._clock
        if not node.resident:
            self._idle.offer(node)

    def _enter(self, node: Node) -> None:
        self._nodes[node.place] = node
        assert node.parent is not None
        node.parent.resident += 1

    def _evict(self) -> int:
        """Move the cached leaf that goes first to the second tier, or forget it, and return its block."""
        node = self._idle.pop()
        block, above = node.place, node.parent
        assert above is not None
        del self._nodes[block]
        self._cached -= 1
        above.resident -= 1
        page = self.offloaded.put(node)
        if page is None:
            self._tree.remove(node)
            self.counts.evictions += 1
        else:
            self._copies.append(BlockCopy(block, page))
            self.counts.offloaded_tokens += self.block_size
        if not above.resident and above is not self._tree.root and not self._references[above.place]:
            self._idle.offer(above)
        return block
