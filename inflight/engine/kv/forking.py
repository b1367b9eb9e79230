"""A KV cache whose sequences can fork: forks share a block until one of them writes into it (copy-on-write)."""

from __future__ import annotations

from dataclasses import replace

from inflight.engine.kv.blocks import BlockCopy, Blocks, BlockTable
from inflight.engine.kv_cache import KvCache


class ForkingKvCache(KvCache):
    """Beside what a cache does, it forks tables, and unshares a block before it is written into."""

    def fork(self, table: BlockTable, computed: int) -> BlockTable:
        """Return a second table of the same blocks; nothing is reserved for it.

        Args:
            table: of a sequence that runs.
            computed: tokens whose keys and values its blocks hold. A block that they do not fill is copied when
                either sequence grows, unless it is no longer shared then.
        """
        for block in table.blocks:
            self._acquire(block)
        table.shared_tail = computed // self.block_size if computed % self.block_size else None
        return replace(table, blocks=Blocks(table.blocks), reserved=0, new_blocks=0)

    def reserve(self, table: BlockTable, blocks: int) -> None:
        """Promise a sequence so many more blocks, in place of what it was promised, or as many more as there are.

        What a fork may have to copy is not known before it forks, and others may have been promised the room since.
        """
        blocks = min(blocks, table.reserved + len(self._free) + self._cached - self._reserved)
        self._reserved += blocks - table.reserved
        table.reserved = blocks

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Give a sequence the blocks to hold ``num_tokens``, the one that it goes on in being its own alone.

        False when there are none (what was given stays).
        """
        return self._unshare(table) and super().grow(table, num_tokens)

    def _unshare(self, table: BlockTable) -> bool:
        position = table.shared_tail
        if position is not None and self._references[table.blocks[position]] > 1:
            if not super().grow(table, (len(table.blocks) + 1) * self.block_size):
                return False
            source, target = table.blocks[position], table.blocks.pop()
            table.blocks[position] = target
            self._copies.append(BlockCopy(source, target))
            self._release(source)
        table.shared_tail = None
        return True
