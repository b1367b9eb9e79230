"""Which slot of the state pool belongs to which sequence, and which to a cached prefix. ``state_pool`` has the tensors.

Keys and values of a prefix serve every sequence that begins with it; a recurrent layer's state is of one length alone.
So a prefix can be reused up to a snapshot: a copy of the state at the end of a cached block, which belongs to the
block's node. A running sequence has a slot of its own; it begins with a copy of a snapshot, or with nothing.

A sequence leaves snapshots at three kinds of places, all of them ends of chunks and of blocks: the last one in its
prompt, so that the same prompt, or a conversation that goes on, is found again; the last one in common with what was
cached when it came, where the next prompt with that beginning will depart too; and every ``interval`` tokens. Beyond
the limit of snapshots the least recently used one is dropped. The second kind is that of Marconi (arXiv:2411.19379).

Every slot is in exactly one of three states: free, of a sequence, of a snapshot.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from inflight.engine.kvcache.blocks import SequenceState, StateCopy, StatePlan
from inflight.engine.kvcache.prefix_tree import Node
from inflight.engine.models.config import STATE_CHUNK

SNAPSHOT_TOKENS = 1024
"""How far apart snapshots are, if the deployment does not say."""


def snapshot_unit(block_size: int) -> int:
    """Return what snapshots lie at multiples of: tokens that are whole chunks and whole blocks."""
    return math.lcm(STATE_CHUNK, block_size)


class StateSlots:
    """Allocates slots; the KV cache's manager drives it."""

    def __init__(self, sequences: int, snapshots: int, block_size: int, interval: int | None = None) -> None:
        """
        Args:
            sequences: how many may run at once.
            snapshots: how many there may be.
            block_size: tokens of a block.
            interval: a multiple of ``snapshot_unit``; None: about ``SNAPSHOT_TOKENS``.
        """
        self.num_slots, self.limit, self._block_size = sequences + snapshots, snapshots, block_size
        self._unit = snapshot_unit(block_size)
        self._interval = interval or -(-SNAPSHOT_TOKENS // self._unit) * self._unit
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._running: set[int] = set()
        self._snapshots: OrderedDict[Node, int] = OrderedDict()
        """The slot of each snapshot, by the node of the block that it is the end of; the least recently used first."""
        self._copies: list[StateCopy] = []

    @property
    def num_running(self) -> int:
        """Slots of sequences."""
        return len(self._running)

    @property
    def num_snapshots(self) -> int:
        """Slots of snapshots."""
        return len(self._snapshots)

    def plan(self, path: Sequence[Node], common: int, prompt: int) -> tuple[int, StatePlan]:
        """Plan a sequence that begins with cached blocks.

        Args:
            path: the nodes of these blocks.
            common: tokens that it has in common with what is cached.
            prompt: tokens of its prompt.

        Returns:
            How many of the blocks it can share, and its plan.
        """
        size = self._block_size
        most = min(len(path), prompt // size)
        shared = next((count for count in range(most, 0, -1) if path[count - 1] in self._snapshots), 0)
        snapshot = self._snapshots[path[shared - 1]] if shared else None
        if not self.limit:
            return shared, StatePlan(prompt, snapshot, ())
        last = (prompt - 1) // self._unit * self._unit
        places = {last, min(last, common // self._unit * self._unit), *range(self._interval, prompt, self._interval)}
        return shared, StatePlan(prompt, snapshot, tuple(sorted(place for place in places if place > shared * size)))

    def admit(self, plan: StatePlan, node: Node | None) -> SequenceState:
        """Give a sequence a slot; ``node``: of the last block that it shares."""
        slot = self._free.pop()
        self._running.add(slot)
        self._copies.append(StateCopy(plan.snapshot, slot))
        if node is not None:
            self._snapshots.move_to_end(node)
        return SequenceState(slot, plan.prompt, plan.leaves)

    def release(self, state: SequenceState) -> None:
        """Take a sequence's slot back."""
        self._running.remove(state.slot)
        self._free.append(state.slot)

    def leave(self, state: SequenceState, node: Node) -> None:
        """Keep a copy of a sequence's state, which is that at the end of a node's block."""
        if node not in self._snapshots:
            if len(self._snapshots) == self.limit:
                self._free.append(self._snapshots.popitem(last=False)[1])
            self._snapshots[node] = self._free.pop()
            self._copies.append(StateCopy(state.slot, self._snapshots[node]))
        self._snapshots.move_to_end(node)

    def drop(self, node: Node) -> None:
        """Forget the snapshot of a block that is evicted, if it has one."""
        slot = self._snapshots.pop(node, None)
        if slot is not None:
            self._free.append(slot)

    def drop_all(self) -> None:
        """Forget all snapshots: copies that were to fill them are lost."""
        for node in list(self._snapshots):
            self.drop(node)

    def take_copies(self) -> list[StateCopy]:
        """Return the copies to make before the next step runs, and forget them."""
        copies, self._copies = self._copies, []
        return copies

    def check_counts(self) -> None:
        """Assert that no slot is lost, in constant time."""
        lost = self.num_slots - len(self._free) - self.num_running - self.num_snapshots
        assert not lost, f"{lost} slots of recurrent state are lost"
        assert self.num_snapshots <= self.limit, f"there are {self.num_snapshots} snapshots"

    def check(self) -> None:
        """Assert that each slot is in one state alone."""
        self.check_counts()
        known = {*self._free, *self._running, *self._snapshots.values()}
        assert known == set(range(self.num_slots)), "a slot of recurrent state has two owners"


def chunk_size(state: SequenceState, start: int, count: int) -> int:
    """Return how many of the next ``count`` tokens, from ``start`` on, a step may compute.

    In a prompt a step ends where a snapshot is to be left, or at the end of a chunk; 0: ``count`` is less than one.
    """
    end = start + count
    stop = next((place for place in state.leaves if start < place <= end), None)
    if stop is not None:
        return stop - start
    return count if end >= state.prompt else max(0, end // STATE_CHUNK * STATE_CHUNK - start)
