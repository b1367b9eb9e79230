"""The paged KV cache's manager decides which sequence has which block, by block id; ``memory_pool`` holds the tensors.

A block holds the keys and values of ``block_size`` tokens. Full blocks are entered into a prefix index
(``prefix_tree``). A block that no sequence references stays cached until its room is needed; the eviction policy says
which block is evicted first (``eviction``). With offloading (``offload``) the contents of an evicted block are kept
outside of the device's cache, and are restored when a sequence begins with them. Sequences that fork share their blocks
until one of them writes into a block (copy-on-write).

Every block is in exactly one of three states: free (no content), used (referenced by a sequence), cached (indexed, not
referenced). free + cached + used == total, always. Offloaded blocks are none of these: they are counted apart. Of a
model with recurrent layers a sequence has a slot for its state besides, and reuses a prefix only as far as there is a
snapshot of that state (``states``).
"""

from __future__ import annotations

import time
from collections import abc
from dataclasses import replace
from typing import TYPE_CHECKING

from inflight.engine.kvcache.blocks import BlockCopy, Blocks, BlockTable, CacheCounts, PrefixMatch, StateCopy, StatePlan
from inflight.engine.kvcache.eviction import POLICIES, EvictionQueue
from inflight.engine.kvcache.offload import OffloadedBlocks
from inflight.engine.kvcache.prefix_tree import Node, PrefixTree
from inflight.engine.kvcache.retention import Retention, apply_retention
from inflight.engine.kvcache.states import StateSlots, chunk_size

if TYPE_CHECKING:  # it needs PyTorch
    from inflight.engine.kvcache.offload_pool import OffloadPool


class KvCacheManager:
    """Allocates blocks: reference counts, reservations, the prefix index, and what is to be copied."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_reuse: bool = True, eviction: str = "lru",
        offload_pool: OffloadPool | None = None, counts: CacheCounts | None = None,
        now_ns: abc.Callable[[], int] = time.monotonic_ns, states: StateSlots | None = None,
    ) -> None:  # fmt: skip
        """``eviction``: a name in ``POLICIES``; ``offload_pool``: where evicted blocks go; None: they are forgotten.

        ``counts``: the counts to go on with; None: they begin at 0. ``now_ns``: the clock by which retention expires.
        ``states``: the slots of recurrent layers' states, with which nothing is offloaded; None: there are no such
        layers.
        """
        self.num_blocks, self.block_size, self._prefix_reuse = num_blocks, block_size, prefix_reuse
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._tree = PrefixTree()
        self._nodes: dict[int, Node] = {}
        """The indexed blocks' nodes, by block id."""
        self.counts = counts or CacheCounts()
        self._evictable = EvictionQueue(POLICIES[eviction], now_ns)
        """Cached blocks without children on the device."""
        evictable_there = EvictionQueue(POLICIES[eviction], now_ns)
        self.offloaded = OffloadedBlocks(self._tree, offload_pool, num_blocks, evictable_there, self.counts)
        """Which blocks are offloaded, and where."""
        self._now_ns, self.states = now_ns, states
        self.num_cached_blocks = 0
        """Blocks that only the prefix index refers to."""
        self.num_used_blocks = 0
        """Blocks that running sequences refer to."""
        self.num_reserved_blocks = 0
        """Blocks promised to running sequences that have not taken them yet."""
        self._clock = 0
        self._copies: list[BlockCopy] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks without content."""
        return len(self._free)

    def allocate(
        self, tokens: abc.Sequence[int], capacity: int, reuse: bool = True, retention: Retention = ()
    ) -> BlockTable | None:
        """Admit a sequence: share the blocks of its longest cached prefix, and reserve room for ``capacity`` tokens.

        Return its table, or None when there is not enough room now.
        """
        match = self.match(tokens, reuse)
        return self.admit(match, capacity, retention) if self.has_room(match, capacity) else None

    def match(self, tokens: abc.Sequence[int], reuse: bool = True, prompt: int | None = None) -> PrefixMatch:
        """Return a sequence's longest cached prefix, valid until the cache changes; it is empty if not ``reuse``.

        ``prompt``: how many of the tokens are the prompt; None: all. Of a model with recurrent layers, nothing behind
        them is reused, since states round otherwise there.
        """
        prompt = len(tokens) if prompt is None else prompt
        if not (reuse and self._prefix_reuse):
            return PrefixMatch([], 0, None, 0, 0, None if self.states is None else StatePlan(prompt, None, ()))
        self.offloaded.drop_lost_pool()
        path, partial, partial_tokens = self._tree.longest_prefix(tokens, self.block_size)
        if self.states is not None:
            common = len(path) * self.block_size + partial_tokens
            shared, states = self.states.plan(path, common, prompt)
            return PrefixMatch(path[:shared], shared, None, 0, shared * self.block_size, states)
        on_device = next((index for index, node in enumerate(path) if self.offloaded.has(node)), len(path))
        return PrefixMatch(path, on_device, partial, partial_tokens, len(path) * self.block_size + partial_tokens)

    def has_room(self, match: PrefixMatch, capacity: int) -> bool:
        """Whether a sequence with this cached prefix can be admitted with room for ``capacity`` tokens."""
        available = len(self._free) + self.num_cached_blocks - self.num_reserved_blocks
        # Blocks that only the index refers to are available, but not those that this sequence is to share.
        to_share = sum(self._references[node.block_id] == 0 for node in match.path[: match.blocks_on_device])
        return self._blocks_to_reserve(match, capacity) <= available - to_share

    def admit(self, match: PrefixMatch, capacity: int, retention: Retention = ()) -> BlockTable:
        """Admit a sequence for which ``has_room``: share its cached prefix, reserve the rest; return its table."""
        shared, reserved = match.path[: match.blocks_on_device], self._blocks_to_reserve(match, capacity)
        for node in shared:
            node.uses += 1
            self._acquire(node.block_id)
        cached_tokens = len(shared) * self.block_size
        table = BlockTable(
            Blocks(node.block_id for node in shared), cached_tokens, reused_blocks=len(shared), reserved=reserved,
            num_computed=cached_tokens, indexed=len(shared), node=shared[-1] if shared else None, retention=retention,
        )  # fmt: skip
        if self.states is not None and match.states is not None:
            table.state = self.states.admit(match.states, table.node)
        self.num_reserved_blocks += reserved
        self._copy_unshared_prefix(table, match)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a sequence blocks for ``num_tokens``; copy the block that it is to write into if a fork shares it.

        Return False when there are no more blocks; the sequence keeps those that it was given.
        """
        if table.shared_tail is not None and not self._unshare(table, table.shared_tail):
            return False
        return len(table.blocks) * self.block_size >= num_tokens or self._extend(table, self.blocks_for(num_tokens))

    def chunk_size(self, table: BlockTable, start: int, count: int) -> int:
        """Return how many of a sequence's next ``count`` tokens, from ``start`` on, a step may compute; 0: too few."""
        return count if table.state is None else chunk_size(table.state, start, count)

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second table of the same blocks; no further blocks are reserved for it.

        If the computed tokens do not fill the last block, a sequence that grows while it is shared copies it.
        """
        for block in table.blocks:
            self._acquire(block)
        whole, begun = divmod(table.num_computed, self.block_size)
        table.shared_tail = whole if begun else None
        return replace(table, blocks=Blocks(table.blocks), reserved=0, new_blocks=0, entered=[])

    def reserve(self, table: BlockTable, blocks: int) -> None:
        """Set a sequence's reservation to ``blocks``, or to as many as there are.

        How many blocks a fork may copy is not known before it forks; other sequences may have reserved them since.
        """
        blocks = min(blocks, table.reserved + len(self._free) + self.num_cached_blocks - self.num_reserved_blocks)
        self.num_reserved_blocks += blocks - table.reserved
        table.reserved = blocks

    def commit(self, table: BlockTable, tokens: abc.Sequence[int], computed: int) -> None:
        """Note that ``computed`` tokens are computed, and enter the blocks that they fill into the prefix index."""
        table.num_computed = computed
        if not self._prefix_reuse:
            return
        size, state = self.block_size, table.state
        end = computed if state is None else min(computed, state.prompt)
        for position in range(table.indexed, end // size):
            self._index_next_block(table, tuple(tokens[position * size : (position + 1) * size]))
        if self.states is not None and state is not None and computed in state.leaves and table.node is not None:
            self.states.leave(state, table.node)

    def mark_computed(self, table: BlockTable, num_tokens: int) -> None:
        """Note that the blocks hold the keys and values of ``num_tokens``, without entering blocks into the index."""
        table.num_computed = num_tokens

    def free(self, table: BlockTable) -> None:
        """Give a sequence's blocks back."""
        self._clock += 1
        if table.retention:
            nodes = [self._nodes[block] for block in table.blocks[: table.indexed]]
            apply_retention(table.retention, nodes, self.block_size, self._now_ns())
        if self._copies:  # the sequence may never have run: what was to be copied for it alone is dropped
            private = {block for block in table.blocks[table.indexed :] if self._references[block] == 1}
            self._copies = [copy for copy in self._copies if copy.target not in private]
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks = Blocks()
        self.num_reserved_blocks -= table.reserved
        table.reserved = 0
        if self.states is not None and table.state is not None:
            self.states.release(table.state)
            table.state = None

    def state(self, block: int) -> str:
        """Return which of the three states a block is in: ``used``, ``cached`` or ``free``."""
        return "used" if self._references[block] else "cached" if block in self._nodes else "free"

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies to make before the next step runs, and forget them."""
        copies, self._copies = self._copies, []
        return copies

    def take_state_copies(self) -> list[StateCopy]:
        """Return the copies of recurrent states to make before the next step runs, and forget them."""
        return [] if self.states is None else self.states.take_copies()

    def forget_copied(self) -> None:
        """Forget what was kept by copies, because those of the last step may be missing."""
        self.offloaded.clear()
        if self.states is not None:
            self.states.drop_all()

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def check_counts(self) -> None:
        """Assert that no block is lost, in constant time."""
        available = len(self._free) + self.num_cached_blocks
        lost = self.num_blocks - available - self.num_used_blocks
        assert not lost, f"{lost} blocks are lost"
        assert 0 <= self.num_reserved_blocks <= available, "more blocks are reserved than there are"
        self.offloaded.check_counts()
        if self.states is not None:
            self.states.check_counts()

    def check(self) -> None:
        """Assert that references, free blocks and the index agree, block by block."""
        self.check_counts()
        used = sum(count > 0 for count in self._references)
        assert used == self.num_used_blocks, f"{used} blocks are referenced, {self.num_used_blocks} are counted as used"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._references[block] for block in self._free), "a free block is referenced"
        self.offloaded.check()
        if self.states is not None:
            self.states.check()

    def _blocks_to_reserve(self, match: PrefixMatch, capacity: int) -> int:
        """Return how many blocks a sequence needs beside those that it shares."""
        return max(self.blocks_for(capacity), len(match.path)) - match.blocks_on_device

    def _copy_unshared_prefix(self, table: BlockTable, match: PrefixMatch) -> None:
        """Plan copies of the cached tokens behind the shared blocks, and count those tokens as computed.

        They are in offloaded blocks and in the first tokens of a partly equal block. The latter is copied only if the
        reservation has a block for it. Where restoring does not pay, nothing is copied.
        """
        sources, partial_tokens = match.path[match.blocks_on_device :], 0
        restored = len(sources) * self.block_size
        if match.partial is not None and table.reserved > len(sources):
            sources, partial_tokens = [*sources, match.partial], match.partial_tokens
            restored += partial_tokens if self.offloaded.has(match.partial) else 0
        if restored and not self.offloaded.decide_restore(restored):
            return
        self.counts.restored_tokens += restored
        deepest = next((node for node in reversed(sources) if self.offloaded.has(node)), None)
        with self.offloaded.holding(deepest):
            # `_take` may evict the partly equal block, and even return it. The copy is right all the same, since the
            # source's id is read first, and `KvPool.copy` reads all sources before it writes.
            copies = [BlockCopy(node.block_id, self._take(table)) for node in sources]
        self._copies += copies
        table.cached_tokens = table.num_computed = len(match.path) * self.block_size + partial_tokens

    def _index_next_block(self, table: BlockTable, content: tuple[int, ...]) -> None:
        """Enter a sequence's first full block that is not in the prefix index; its tokens are ``content``.

        If the index has an equal block on the device, the sequence shares that one and gives its own back. If the equal
        block is offloaded, its node takes the sequence's block, and the offload block is freed.
        """
        position, parent = table.indexed, table.node or self._tree.root
        block, node = table.blocks[position], self._tree.child(parent, content)
        if node is None:
            node = self._tree.add(parent, content, block)
            table.entered.append(range(position * self.block_size, (position + 1) * self.block_size))
        else:
            node.uses += 1
            if self.offloaded.has(node):
                self.offloaded.take_back(node, block)
        if node.block_id != block:
            self._acquire(node.block_id)
            table.blocks[position] = node.block_id
            self._release(block)
        elif block not in self._nodes:  # otherwise a fork, which shares the block, has entered it already
            self._nodes[block] = node
            parent.children_on_device += 1
        table.node, table.indexed = node, position + 1

    def _extend(self, table: BlockTable, num_blocks: int) -> bool:
        """Give a sequence blocks until it has ``num_blocks``; False when there are no more."""
        while len(table.blocks) < num_blocks:
            if not table.reserved and len(self._free) + self.num_cached_blocks <= self.num_reserved_blocks:
                return False
            self._take(table)
        return True

    def _unshare(self, table: BlockTable, position: int) -> bool:
        """Copy the block at this position for a sequence, if another sequence still shares the block."""
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
        self.num_used_blocks += 1
        table.blocks.append(block)
        table.new_blocks += 1
        if table.reserved:
            table.reserved -= 1
            self.num_reserved_blocks -= 1
        return block

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            self.num_cached_blocks -= 1
            self.num_used_blocks += 1
            self._evictable.withdraw(self._nodes[block])
        self._references[block] += 1

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block]:
            return
        self.num_used_blocks -= 1
        node = self._nodes.get(block)
        if node is None:
            self._free.append(block)
            return
        self.num_cached_blocks += 1
        node.last_used = self._clock
        if not node.children_on_device:
            self._evictable.offer(node)

    def _evict(self) -> int:
        """Offload the cached block that goes first, or forget it, and return its id."""
        node = self._evictable.pop()
        block, parent = node.block_id, node.parent
        assert parent is not None
        del self._nodes[block]
        self.num_cached_blocks -= 1
        parent.children_on_device -= 1
        offload_block = self.offloaded.put(node)
        if offload_block is None:
            self._tree.remove(node)
            self.counts.evictions += 1
            if self.states is not None:
                self.states.drop(node)
        else:
            self._copies.append(BlockCopy(block, offload_block))
            self.counts.offloaded_tokens += self.block_size
        if not parent.children_on_device and parent is not self._tree.root and not self._references[parent.block_id]:
            self._evictable.offer(parent)
        return block
