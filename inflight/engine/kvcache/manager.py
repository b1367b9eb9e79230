"""The paged KV cache's manager: it says which sequence has which block. It handles block ids; ``pool`` is the memory.

A block holds the keys and values of ``block_size`` tokens. Full blocks are entered in a prefix index
(``prefix_tree``). A block that no sequence references stays cached until its room is needed; the eviction policy says
which leaf is evicted first (``eviction``). With offloading (``offload``) the contents of an evicted block are kept
outside of the cache, and come back when a sequence begins with them. Sequences that fork share their blocks until one
of them writes into a block (copy-on-write).

Every block is in exactly one of three states: free (no content), used (referenced by a sequence), cached (indexed, not
referenced). free + cached + used == total, always. Offloaded blocks are none of these: they are counted apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from inflight.engine.kvcache.blocks import BlockCopy, Blocks, BlockTable, CacheCounts, PrefixMatch
from inflight.engine.kvcache.eviction import POLICIES, EvictionQueue
from inflight.engine.kvcache.offload import OffloadedBlocks
from inflight.engine.kvcache.prefix_tree import Node, PrefixTree
from inflight.engine.kvcache.retention import Retention, apply_retention

if TYPE_CHECKING:  # it needs PyTorch
    from inflight.engine.kvcache.offload_pool import OffloadPool


class KvCacheManager:
    """Allocates blocks: reference counts, reservations, the prefix index, and what is to be copied."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_reuse: bool = True,
        eviction: str = "lru",
        offload_pool: OffloadPool | None = None,
        counts: CacheCounts | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``eviction``: a name in ``POLICIES``; ``offload_pool``: where evicted blocks go; None: they are forgotten.

        ``counts``: the counts to go on with; None: they begin at 0. ``now_ns``: the clock by which retention expires.
        """
        self.num_blocks, self.block_size, self._prefix_reuse = num_blocks, block_size, prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._tree = PrefixTree()
        self._nodes: dict[int, Node] = {}
        """The indexed blocks' nodes, by block id."""
        self.counts = counts or CacheCounts()
        self._idle, queue = (EvictionQueue(POLICIES[eviction], now_ns) for _ in range(2))
        """Cached blocks whose children, if any, are all offloaded: these can be evicted."""
        self.offloaded = OffloadedBlocks(self._tree, offload_pool, num_blocks, queue, self.counts)
        """Which blocks are offloaded, and where."""
        self._now_ns = now_ns
        self.cached_blocks = 0
        """Blocks that only the prefix index refers to; they can be evicted."""
        self.used_blocks = 0
        """Blocks that running sequences refer to."""
        self.reserved_blocks = 0
        """Blocks promised to running sequences that have not taken them yet."""
        self._clock = 0
        self._copies: list[BlockCopy] = []

    @property
    def free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._free)

    def open(
        self, tokens: Sequence[int], capacity: int, reuse: bool = True, retention: Retention = ()
    ) -> BlockTable | None:
        """Admit a sequence: share the blocks of its longest known prefix, and reserve room for ``capacity`` tokens.

        Return its table, or None when there is not enough room now.
        """
        match = self.match(tokens, reuse)
        return self.admit(match, capacity, retention) if self.has_room(match, capacity) else None

    def match(self, tokens: Sequence[int], reuse: bool = True) -> PrefixMatch:
        """Return the longest known prefix of a sequence, valid until the cache changes; not ``reuse``: an empty one."""
        if not (reuse and self._prefix_reuse):
            return PrefixMatch([], 0, None, 0, 0)
        self.offloaded.poll()
        path, partial, common = self._tree.match(tokens, self.block_size)
        resident = next((index for index, node in enumerate(path) if self.offloaded.has(node)), len(path))
        return PrefixMatch(path, resident, partial, common, len(path) * self.block_size + common)

    def has_room(self, match: PrefixMatch, capacity: int) -> bool:
        """Whether a sequence with this known prefix can be admitted with room for ``capacity`` tokens."""
        available = len(self._free) + self.cached_blocks - self.reserved_blocks
        idle = sum(self._references[node.block_id] == 0 for node in match.path[: match.resident])
        return self._needed(match, capacity) <= available - idle

    def admit(self, match: PrefixMatch, capacity: int, retention: Retention = ()) -> BlockTable:
        """Admit a sequence for which ``has_room``: share its known prefix, reserve the rest; return its table."""
        known, needed = match.resident, self._needed(match, capacity)
        for node in match.path[:known]:
            node.uses += 1
            self._acquire(node.block_id)
        shared, last = Blocks(node.block_id for node in match.path[:known]), match.path[known - 1] if known else None
        cached = known * self.block_size
        table = BlockTable(shared, cached, known, cached, needed, 0, known, last, retention)
        self.reserved_blocks += needed
        self._copy_known(table, match)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a sequence blocks for ``num_tokens``, and a copy of its own of a shared block that it goes on in.

        Return False when there are no more blocks; those that were given stay.
        """
        if table.shared_tail is not None and not self._unshare(table, table.shared_tail):
            return False
        return len(table.blocks) * self.block_size >= num_tokens or self._extend(table, self.blocks_for(num_tokens))

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table of the same blocks; no further blocks are reserved for it.

        A block that the computed tokens do not fill is copied when either sequence grows, unless it is no longer shared
        then.
        """
        for block in table.blocks:
            self._acquire(block)
        whole, begun = divmod(table.num_computed, self.block_size)
        table.shared_tail = whole if begun else None
        return replace(table, blocks=Blocks(table.blocks), reserved=0, new_blocks=0)

    def reserve(self, table: BlockTable, blocks: int) -> None:
        """Set a sequence's reservation to so many blocks, or to as many as there are.

        What a fork may have to copy is not known before it forks, and others may have reserved the room since.
        """
        blocks = min(blocks, table.reserved + len(self._free) + self.cached_blocks - self.reserved_blocks)
        self.reserved_blocks += blocks - table.reserved
        table.reserved = blocks

    def commit(self, table: BlockTable, tokens: Sequence[int], computed: int) -> None:
        """Note that so many tokens are ``computed``, and enter the blocks that are full now into the prefix index.

        Where the index already has an equal block, the sequence takes that one and gives its own back; where the index
        has it offloaded, the sequence's own takes its place.
        """
        table.num_computed = computed
        size = self.block_size
        if not self._prefix_reuse or computed < (table.indexed + 1) * size:
            return
        for position in range(table.indexed, computed // size):
            content = tuple(tokens[position * size : (position + 1) * size])
            above, block = table.node or self._tree.root, table.blocks[position]
            node = self._tree.child(above, content)
            if node is None:
                node = self._tree.add(above, content, block)
            else:
                node.uses += 1
                if self.offloaded.has(node):
                    self.offloaded.take_back(node, block)
            if node.block_id != block:
                self._acquire(node.block_id)
                table.blocks[position] = node.block_id
                self._release(block)
            elif block not in self._nodes:
                self._nodes[block] = node
                above.resident += 1
            table.node = node
            table.indexed = position + 1

    def mark_computed(self, table: BlockTable, num_tokens: int) -> None:
        """Note that the blocks hold the keys and values of so many tokens, without entering them into the index."""
        table.num_computed = num_tokens

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
        self.reserved_blocks -= table.reserved
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
        """Assert that no block is lost, in constant time."""
        available = len(self._free) + self.cached_blocks
        lost = self.num_blocks - available - self.used_blocks
        assert not lost, f"{lost} blocks are lost"
        assert 0 <= self.reserved_blocks <= available, "more blocks are reserved than there are"
        self.offloaded.check_counts()

    def check(self) -> None:
        """Assert that references, free blocks and the index agree, block by block."""
        self.check_counts()
        used = sum(count > 0 for count in self._references)
        assert used == self.used_blocks, f"{used} blocks are referenced, {self.used_blocks} are counted as used"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._references[block] for block in self._free), "a free block is referenced"
        self.offloaded.check()

    def _needed(self, match: PrefixMatch, capacity: int) -> int:
        """Return the blocks to reserve beside those that are shared."""
        return max(self.blocks_for(capacity), len(match.path)) - match.resident

    def _copy_known(self, table: BlockTable, match: PrefixMatch) -> None:
        """Plan copies of what is known behind the shared blocks: offloaded blocks, then the beginning of a block."""
        size, offloaded = self.block_size, match.path[match.resident :]
        partial, common = (match.partial, match.common) if table.reserved > len(offloaded) else (None, 0)
        wanted = offloaded if partial is None else [*offloaded, partial]
        deepest = next((node for node in reversed(wanted) if self.offloaded.has(node)), None)
        restored = len(offloaded) * size + (common if deepest is partial else 0)
        if restored and not self.offloaded.can_restore(restored):
            return
        self.counts.restored_tokens += restored
        with self.offloaded.holding(deepest):
            # The partly equal block may be evicted by this very call: it is read before anything is written.
            copies = [BlockCopy(node.block_id, self._take(table)) for node in wanted]
        self._copies += copies
        table.cached_tokens = table.num_computed = len(match.path) * size + common

    def _extend(self, table: BlockTable, num_blocks: int) -> bool:
        """Give a sequence blocks until it has ``num_blocks``; False when there are no more."""
        while len(table.blocks) < num_blocks:
            if not table.reserved and len(self._free) + self.cached_blocks <= self.reserved_blocks:
                return False
            self._take(table)
        return True

    def _unshare(self, table: BlockTable, position: int) -> bool:
        """Give a sequence a copy of its own of the block at this position, if it is shared still."""
        if self._references[table.blocks[position]] > 1:
            if not self._extend(table, len(table.blocks) + 1):
                return False
            source, target = table.blocks[position], table.blocks.pop()
            table.blocks[position] = target
            self._copies.append(BlockCopy(source, target))
            self._release(source)
        table.shared_tail = None
        return True

    def _take(self, table: BlockTable) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._references[block] = 1
        self.used_blocks += 1
        table.blocks.append(block)
        table.new_blocks += 1
        if table.reserved:
            table.reserved -= 1
            self.reserved_blocks -= 1
        return block

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            self.cached_blocks -= 1
            self.used_blocks += 1
            self._idle.withdraw(self._nodes[block])
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self.used_blocks -= 1
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
            return
        self.cached_blocks += 1
        node.last_used = self._clock
        if not node.resident:
            self._idle.offer(node)

    def _evict(self) -> int:
        """Offload the cached leaf that goes first, or forget it, and return its block."""
        node = self._idle.pop()
        block, above = node.block_id, node.parent
        assert above is not None
        del self._nodes[block]
        self.cached_blocks -= 1
        above.resident -= 1
        slot = self.offloaded.put(node)
        if slot is None:
            self._tree.remove(node)
            self.counts.evictions += 1
        else:
            self._copies.append(BlockCopy(block, slot))
            self.counts.offloaded_tokens += self.block_size
        if not above.resident and above is not self._tree.root and not self._references[above.block_id]:
            self._idle.offer(above)
        return block
