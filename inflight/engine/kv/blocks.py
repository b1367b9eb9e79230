"""What the KV cache hands out: the table of a sequence's blocks, and copies to make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

from inflight.engine.kv.prefix_tree import Node
from inflight.engine.kv.retention import Retention


class BlockCopy(NamedTuple):
    """The whole block ``source`` is to be copied into ``target`` before the next step runs.

    Copy-on-write, and both ways between cache and second tier: numbers from the cache's ``num_blocks`` on are the
    tier's pages. Copies take effect in their order.
    """

    source: int
    target: int


class PrefixMatch(NamedTuple):
    """What the prefix index knows of a sequence's first tokens."""

    path: list[Node]
    """The full blocks."""
    resident: int
    """How many of them, from the first on, are in the cache; the others are in the second tier."""
    partial: Node | None
    """The block behind them that begins as the sequence goes on; None: there is none."""
    common: int
    """Tokens that it has in common with the sequence."""
    tokens: int
    """Tokens that need not be computed, if restoring those in the second tier pays."""


class Blocks(list[int]):
    """Numbers of blocks, mostly appended to; it counts the other changes, for whoever has a copy.

    Those are assignment and ``pop``. Who needs another one, such as ``insert``, has to count it here first.
    """

    __slots__ = ("replaced",)

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self.replaced = 0

    def __setitem__(self, place: Any, block: Any) -> None:
        self.replaced += 1
        super().__setitem__(place, block)

    def pop(self, place: SupportsIndex = -1) -> int:
        """Take one out, as a list does."""
        self.replaced += 1
        return super().pop(place)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    blocks: Blocks
    cached_tokens: int
    """Tokens whose keys and values were there already when the sequence was admitted."""
    reused_blocks: int
    reserved: int = 0
    """Blocks that this sequence may still take and nobody else."""
    new_blocks: int = 0
    indexed: int = 0
    """How many of ``blocks`` are in the prefix index."""
    node: Node | None = None
    """The last of them; None: there are none."""
    retention: Retention = ()
    shared_tail: int | None = None
    """The place of a block that is not full and that a fork of this table may share."""


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done so far."""

    evictions: int = 0
    """Blocks forgotten, in the cache or in the second tier."""
    offloaded_tokens: int = 0
    """Moved to the second tier."""
    restored_tokens: int = 0
    """Come back from there."""
