"""The scheduler: which tokens of which sequences the next step computes.

It owns the queue and the running set. The policy, in order: running sequences decode, one token each; running prefills
go on, in chunks; waiting sequences are admitted. All under one budget of tokens per step, by rank (priority, then
arrival). Two policies of capacity, upstream's: ``guaranteed_no_evict`` reserves a sequence's longest possible length
when it is admitted, so that it never has to stop; ``max_utilization`` reserves nothing, and when blocks run out the
sequence of lowest rank gives its blocks back and is computed again later.
"""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

from inflight.engine.config import EngineConfig
from inflight.engine.kv_cache import KvCache
from inflight.engine.sequence import Sequence


class Chunk(NamedTuple):
    """A part of one sequence's tokens, computed in one step."""

    sequence: Sequence
    start: int
    size: int

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new token of this sequence."""
        return self.start + self.size == len(self.sequence.tokens)


class Scheduler:
    """Owns the waiting and the running sequences."""

    def __init__(self, config: EngineConfig, cache: KvCache) -> None:
        self._max_batch_size = config.max_batch_size
        self._budget = config.max_tokens_per_step
        self._no_evict = config.policy == "guaranteed_no_evict"
        self._cache = cache
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self.running: list[Sequence] = []

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue, in no particular order."""
        return [sequence for _, sequence in self._waiting]

    @property
    def num_waiting(self) -> int:
        """How many sequences are in the queue."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence.table is not None:
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self._waiting.remove((sequence.rank, sequence))
            heapq.heapify(self._waiting)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks. Empty only when nothing runs or waits."""
        step = _Step(self._budget)
        self.running.sort(key=lambda sequence: (sequence.prefilling, sequence.rank))
        for sequence in list(self.running):
            if sequence.table is not None and step.budget:
                self._continue(sequence, step)
        while self._waiting and step.budget and len(self.running) < self._max_batch_size:
            if not self._admit(self._waiting[0][1], step):
                break
            heapq.heappop(self._waiting)
        return list(step.chunks.values())

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        count = min(sequence.remaining, step.budget)
        assert sequence.table is not None
        while not self._cache.grow(sequence.table, sequence.computed + count):
            victim = max(self.running, key=lambda candidate: candidate.rank)
            step.drop(victim)
            self._preempt(victim)
            if victim is sequence:
                return
        step.add(sequence, count)

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        tokens = sequence.tokens
        sampling = sequence.request.sampling
        longest = min(sequence.max_length, len(sequence.request.prompt) + sampling.max_tokens)
        capacity = longest if self._no_evict else min(len(tokens), step.budget)
        table = self._cache.open(tokens, capacity, reuse=not sampling.context_logits)
        if table is None:
            return False
        sequence.table, sequence.computed = table, table.cached_tokens
        count = min(sequence.remaining, step.budget)
        if not self._cache.grow(table, sequence.computed + count):
            self._cache.close(table)
            sequence.table, sequence.computed = None, 0
            return False
        metrics = sequence.metrics
        if not metrics.first_scheduled_ns:
            metrics.first_scheduled_ns = time.time_ns()
            metrics.cached_tokens = table.cached_tokens
            metrics.reused_blocks = table.reused_blocks
        self.running.append(sequence)
        step.add(sequence, count)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.metrics.preemptions += 1
        self.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        table = sequence.table
        assert table is not None
        sequence.metrics.new_blocks += table.new_blocks
        sequence.metrics.total_blocks = sequence.metrics.new_blocks + sequence.metrics.reused_blocks
        self._cache.close(table)
        sequence.table, sequence.computed = None, 0
        sequence.context_logits.clear()


class _Step:
    """The step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[Sequence, Chunk] = {}

    def add(self, sequence: Sequence, count: int) -> None:
        self.chunks[sequence] = Chunk(sequence, sequence.computed, count)
        self.budget -= count

    def drop(self, sequence: Sequence) -> None:
        chunk = self.chunks.pop(sequence, None)
        if chunk is not None:
            self.budget += chunk.size
