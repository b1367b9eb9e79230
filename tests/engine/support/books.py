"""A scheduler and its cache without a model, driven step by step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request import Request
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.engine.stats import EngineStats
from inflight.sampling import SamplingParams


class Tier:
    """Pages that can go, and a rule that the test sets."""

    def __init__(self, blocks: int) -> None:
        self.capacity, self.there, self.pay = blocks, True, True
        self.rule = self

    def check_usable(self) -> bool:
        return self.there

    def decide(self, tokens: int) -> bool:
        assert tokens > 0
        return self.pay


Policy = Literal["guaranteed_no_evict", "max_utilization"]
POLICIES: list[Policy] = ["guaranteed_no_evict", "max_utilization"]
SIZE = 4
SECOND = 10**9


class Books:
    """A scheduler and its cache; ``step`` does what the engine does, with made-up tokens, and takes a second."""

    def __init__(self, policy: Policy = "guaranteed_no_evict", blocks: int = 16, **more: Any) -> None:
        self.config = EngineConfig(Path(), block_size=SIZE, num_blocks=blocks, policy=policy, **more)
        self.cache = KvCacheManager(blocks, SIZE, self.config.prefix_reuse)
        self.now_ns = SECOND
        self.scheduler = Scheduler(self.config, self.cache, lambda: self.now_ns)
        self.chance = random.Random(1)
        self.stats = EngineStats()
        self.ended: list[Sequence] = []
        self.late: list[Sequence] = []
        self._order = 0

    def add(self, prompt: int | list[int], max_tokens: int = 4, priority: int = 0, **more: Any) -> Sequence:
        """Queue a prompt, or one of so many tokens that no other has."""
        tokens = [1000 * self._order + place for place in range(prompt)] if isinstance(prompt, int) else prompt
        request = Request(tokens, SamplingParams(max_tokens), priority=priority, arrival_ns=self.now_ns, **more)
        sequence = Sequence(request, self._order, 0, self.config.num_blocks * SIZE, None, self.config.priority_aging_ns)
        self._order += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Chunk]:
        """Schedule, check, and pretend to run; return the chunks."""
        for sequence in self.scheduler.take_expired():
            self.scheduler.remove(sequence)
            self.late.append(sequence)
        chunks = self.scheduler.schedule()
        self._check(chunks)
        self.now_ns += SECOND
        self.cache.take_copies()
        for chunk in chunks:
            sequence = chunk.sequence
            assert sequence.table is not None
            self.cache.commit(sequence.table, sequence.tokens, chunk.start + chunk.size)
            if chunk.samples and sequence.append(self.chance.randrange(3), self.stats):
                self.scheduler.remove(sequence)
                self.ended.append(sequence)
        return chunks

    def _check(self, chunks: list[Chunk]) -> None:
        self.cache.check()
        assert sum(chunk.size for chunk in chunks) <= self.config.max_tokens_per_step
        assert len(self.scheduler.running) <= self.config.max_batch_size
        assert len({chunk.sequence for chunk in chunks}) == len(chunks)
        idle = not self.scheduler.running and (not self.scheduler.num_waiting or self.scheduler.due_in_s)
        assert chunks or idle, "nobody gets on"
        for chunk in chunks:
            table = chunk.sequence.table
            assert table is not None, "a chunk of a sequence that does not run"
            assert chunk.sequence in self.scheduler.running
            assert chunk.start == chunk.sequence.computed
            assert chunk.size > 0
            assert len(table.blocks) * SIZE >= chunk.start + chunk.size
        waiting = list(self.scheduler._queue)
        assert self.scheduler.num_waiting == len(waiting)
        assert self.scheduler.num_paused == sum(one.metrics.preemptions > 0 for one in waiting)
        assert all(one.table is None and not one.computed for one in waiting)
        assert not set(waiting) & set(self.scheduler.running)


def sizes(chunks: list[Chunk]) -> dict[Sequence, int]:
    return {chunk.sequence: chunk.size for chunk in chunks}
