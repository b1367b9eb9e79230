"""The records that the KV cache manager hands out: a sequence's block table, copies to make, and counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

from inflight.engine.kvcache.prefix_tree import Node
from inflight.engine.kvcache.retention import Retention


class BlockCopy(NamedTuple):
    """The whole block ``source`` is to be copied into ``target`` before the next step runs.

    Copies serve copy-on-write, offloading and restoring: ids from the cache's ``num_blocks`` on are offload blocks.
    Copies take effect in their order.
    """

    source: int
    target: int


class StateCopy(NamedTuple):
    """The state in slot ``source`` is to be copied into slot ``target`` before the next step runs; None: it is cleared.

    Copies take effect in their order.
    """

    source: int | None
    target: int


class StatePlan(NamedTuple):
    """What a sequence is to do with its recurrent state."""

    prompt: int
    """Tokens of its prompt: these are computed chunk by chunk, and can be reused; those behind them are not."""
    snapshot: int | None
    """The slot with the state that it begins with; None: it begins with nothing."""
    leaves: tuple[int, ...]
    """After how many tokens it leaves snapshots, in their order."""


class SequenceState(NamedTuple):
    """A running sequence's recurrent state."""

    slot: int
    prompt: int
    """As in ``StatePlan``; so is ``leaves``."""
    leaves: tuple[int, ...]


class PrefixMatch(NamedTuple):
    """A sequence's longest cached prefix."""

    path: list[Node]
    """Its full blocks."""
    blocks_on_device: int
    """How many of them, from the first on, are on the device; the others are offloaded."""
    partial: Node | None
    """The block behind them whose first tokens are the sequence's next ones; None: there is none."""
    partial_tokens: int
    """Tokens that it has in common with the sequence."""
    num_tokens: int
    """Tokens that need not be computed, if restoring the offloaded ones pays."""
    states: StatePlan | None = None
    """None: the model has no recurrent layers."""


class Blocks(list[int]):
    """The ids of a sequence's blocks; it counts changes other than appending, so that copies can be kept up to date.

    These changes are assignment and ``pop``. A caller that needs another one, such as ``insert``, must count it here.
    """

    __slots__ = ("replaced",)

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        super().__init__(blocks)
        self.replaced = 0

    def __setitem__(self, index: Any, block: Any) -> None:
        self.replaced += 1
        super().__setitem__(index, block)

    def pop(self, index: SupportsIndex = -1) -> int:
        """Remove an id and return it, as a list does."""
        self.replaced += 1
        return super().pop(index)


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    blocks: Blocks
    cached_tokens: int
    """Tokens whose keys and values the cache had when the sequence was admitted."""
    reused_blocks: int
    """Blocks that were shared from the prefix index when the sequence was admitted."""
    num_computed: int = 0
    """Tokens of the sequence whose keys and values the blocks hold."""
    reserved: int = 0
    """Blocks that are reserved for this sequence and that it has not taken yet."""
    new_blocks: int = 0
    """Blocks that were allocated for it."""
    entered: list[range] = field(default_factory=list)
    """The tokens of each of its blocks that the prefix index did not have before."""
    indexed: int = 0
    """How many of ``blocks`` are in the prefix index."""
    node: Node | None = None
    """The node of the last of them; None: there are none."""
    retention: Retention = ()
    shared_tail: int | None = None
    """The index of a block that is not full and that a fork of this table may share."""
    state: SequenceState | None = None
    """None: the model has no recurrent layers."""


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done so far, in blocks and tokens."""

    evictions: int = 0
    """Blocks whose contents were dropped, on the device or from the offload pool."""
    offloaded_tokens: int = 0
    """Tokens whose blocks were offloaded."""
    restored_tokens: int = 0
    """Tokens whose blocks were restored."""
