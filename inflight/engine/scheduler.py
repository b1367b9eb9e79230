"""The scheduler: which tokens of which sequences the next step computes.

It owns the queue and the running set. The policy, in order: running sequences decode, one token each; running prefills
go on, in chunks; waiting sequences are admitted, when the mode of batching lets them. All under one budget of tokens
per step; the running ones by rank, the waiting ones as their queue has them. Two policies of capacity, upstream's:
``guaranteed_no_evict`` reserves a sequence's longest possible length when it is admitted, so that it never has to stop;
``max_utilization`` reserves nothing, and when blocks run out the sequence of lowest rank gives its blocks back and is
computed again later.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.deadlines import Deadlines
from inflight.engine.kv_cache import BlockTable, KvCache
from inflight.engine.sequence import Sequence, rank_of
from inflight.engine.waiting import WaitingQueue

_BY_RANK = attrgetter("rank")
_TRUST = 0.9
"""What a refusal leaves of the time of a step that it was made by: one that was disturbed must not refuse for ever."""


class Scheduler:
    """Owns the waiting and the running sequences."""

    def __init__(self, config: EngineConfig, cache: KvCache, clock: Callable[[], int] = time.time_ns) -> None:
        """
        Args:
            config: settings.
            cache: its blocks.
            clock: returns the time in nanoseconds, as ``time.time_ns`` does.
        """
        self._config = config
        self._cache = cache
        self._clock = clock
        self._fair = config.fairness == "client"
        self._queue = WaitingQueue(self._fair)
        self._paused: set[Sequence] = set()
        self._too_late: list[Sequence] = []
        self._deadlines = Deadlines(lambda sequence: sequence.table is not None or sequence in self._queue)
        self._full_step_s = 0.0
        """Time of the fastest step so far that used up the budget; 0: there was none."""
        self.running: list[Sequence] = []
        """By rank."""
        self.preemptions = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences in the queue, in no particular order."""
        return list(self._queue)

    @property
    def num_waiting(self) -> int:
        """How many sequences are in the queue."""
        return len(self._queue)

    @property
    def num_paused(self) -> int:
        """How many of them were preempted."""
        return len(self._paused)

    @property
    def due_in_s(self) -> float:
        """Seconds until there is something to do, if nothing arrives before; 0: now. Only a batch that fills up waits,
        for what it lacks or for a deadline to pass."""
        seconds = self._batch_due_in_s()
        return seconds and self._deadlines.within_s(seconds, self._clock())

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        sequence.rank = rank_of(sequence.request, sequence.order, self._config.priority_aging_ns)
        self._queue.push(sequence)
        self._deadlines.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back."""
        if sequence.table is not None:
            for member in sequence.members:
                self._release(member)
                self.running.remove(member)
        else:
            self._queue.discard(sequence)
            self._paused.discard(sequence)
            if sequence in self._too_late:
                self._too_late.remove(sequence)

    def preempt_all(self) -> None:
        """Have all that run begin again: their blocks do not hold what they should."""
        while self.running:
            self._preempt(self.running[-1], _Step(self._config))

    def begin(self) -> None:
        """Forget how long steps took: those of the warm-up are longer than any other."""
        self._full_step_s = 0.0

    def adopt(self, forks: Iterable[Sequence]) -> None:
        """Take in forks of a sequence that runs; they have their blocks."""
        for fork in forks:
            fork.charged = max(fork.computed, fork.leader.charged)
            bisect.insort(self.running, fork, key=_BY_RANK)

    def schedule(self) -> list[Chunk]:
        """Choose the next step's chunks. Empty when nothing runs or waits, or a batch still fills up."""
        step = _Step(self._config)
        preemptions = self.preemptions
        self._continue_running(step)
        self.charge(step.chunks.values())
        if self._queue and self.preemptions == preemptions and self._may_admit():
            self._admit_waiting(step)
        return list(step.chunks.values())

    def schedule_after(self, launched: Iterable[Chunk]) -> list[Chunk]:
        """Choose the chunks of the step after one that still runs; empty: what to do shows when that one is read.

        It is what ``schedule`` would choose, should no sequence end that need not. Nobody is preempted for it. Those
        who go on are charged for it when it is their turn, see ``charge``.

        Args:
            launched: the chunks of the step that runs. Those that sample make a token that nobody has read.
        """
        step = _Step(self._config, {chunk.sequence: chunk for chunk in launched})
        self._continue_running(step)
        if self._queue and not step.given_up and self._may_admit():
            self._admit_waiting(step)
        return [] if step.given_up else list(step.chunks.values())

    def take_late(self) -> list[Sequence]:
        """Return, once, the sequences whose deadline has passed, or would pass before their first token."""
        too_late, self._too_late = self._too_late, []
        return too_late + self._deadlines.take_passed(self._clock())

    def count_step(self, chunks: list[Chunk], seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        if sum(chunk.size for chunk in chunks) == self._config.max_tokens_per_step:
            self._full_step_s = min(self._full_step_s or seconds, seconds)

    def _continue_running(self, step: _Step) -> None:
        prefills = []
        for sequence in list(self.running):
            remaining = step.remaining(sequence)
            if remaining > 1:
                prefills.append(sequence)
            elif remaining and step.budget:
                self._continue(sequence, 1, step)
        step.begin_prefills()
        for sequence in prefills:
            if step.budget:
                self._continue(sequence, min(step.remaining(sequence), step.budget), step)

    def _continue(self, sequence: Sequence, count: int, step: _Step) -> None:
        table = sequence.table
        if table is None:  # preempted in this very step
            return
        start = step.computed(sequence)
        while not self._cache.grow(table, start + count):
            if step.launched:
                step.give_up()
                return
            self._preempt(self.running[-1], step)
            if sequence.table is None:
                return
        step.chunks[sequence] = Chunk(sequence, start, count, awaits=start == len(sequence.tokens))
        step.budget -= count

    def _batch_due_in_s(self) -> float:
        config, queue = self._config, self._queue
        if config.mode != "dynamic" or self.running or not 0 < len(queue) < config.max_batch_size:
            return 0.0
        waited_ns = self._clock() - min(sequence.request.arrival_ns for sequence in queue)
        return max(0.0, config.max_queue_delay_ms / 1e3 - waited_ns / 1e9)

    def _may_admit(self) -> bool:
        """Whether sequences may join now: at any time, or only when a new batch forms."""
        return self._config.mode == "inflight" or not (self.running or self._batch_due_in_s())

    def _admit_waiting(self, step: _Step) -> None:
        batches = self._config.mode != "inflight"  # all of a batch is admitted at once, its prompts' chunks come later
        staying = [sequence for sequence in self.running if not step.ends(sequence)]
        if len(staying) >= self._config.max_batch_size:
            return
        places = self._config.max_batch_size - sum(sequence.places for sequence in staying)
        while self._queue and (batches or step.budget):
            sequence = self._queue.first
            if sequence.places > places:
                return
            if not self._admit(sequence, step):
                if any(step.ends(one) for one in self.running):
                    step.give_up()  # they leave blocks
                return
            places -= sequence.places if sequence.table is not None else 0

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        """Have a sequence run, or put it aside as too late; return whether there was room."""
        match = self._cache.match(sequence.tokens, reuse=not sequence.request.sampling.context_logits)
        if step.makes_known(sequence, match.tokens, self._cache.block_size):
            step.give_up()
            return False
        capacity = self._capacity(sequence, match.tokens, step)
        if not self._cache.has_room(match, capacity):
            return False
        if self._is_too_late(sequence, match.tokens):
            self._full_step_s *= _TRUST
            self._too_late.append(self._queue.pop())
            return True
        table = self._cache.admit(match, capacity, sequence.request.retention)
        sequence.table, sequence.computed = table, table.cached_tokens
        sequence.charged = max(sequence.charged, sequence.computed)
        self._queue.pop()
        self._paused.discard(sequence)
        bisect.insort(self.running, sequence, key=_BY_RANK)
        _note_admission(sequence, table)
        count = min(sequence.remaining, step.budget)
        if count:
            self._continue(sequence, count, step)
            self.charge([step.chunks[sequence]])
        return True

    def _capacity(self, sequence: Sequence, known: int, step: _Step) -> int:
        """Return the tokens for which there must be room to admit a sequence of which so many are known."""
        if sequence.group is not None and self._config.policy == "guaranteed_no_evict":
            return sequence.group.blocks_needed(self._cache.block_size) * self._cache.block_size
        if self._config.policy == "guaranteed_no_evict":
            return sequence.longest
        tokens = len(sequence.tokens)
        return min(tokens, known + step.budget) if self._config.mode == "inflight" else tokens

    def _is_too_late(self, sequence: Sequence, known: int) -> bool:
        """Whether the whole steps that the prompt needs, as fast as can be, go beyond the deadline."""
        deadline = sequence.request.deadline_ns
        steps = (len(sequence.tokens) - known) // self._config.max_tokens_per_step
        if deadline is None or sequence.metrics.first_token_ns:
            return False
        return self._clock() + steps * self._full_step_s * 1e9 > deadline

    def charge(self, chunks: Iterable[Chunk]) -> None:
        """Count what is new as served to its clients: accepted drafts too, but not what a preemption has lost."""
        if not self._fair:
            return
        served: dict[str, int] = defaultdict(int)
        for chunk in chunks:
            sequence, start, size = chunk[:3]
            new = start + size - sequence.charged
            if new > 0:
                sequence.charged += new
                served[sequence.request.client_id] += new
        for client_id, tokens in served.items():
            self._queue.charge(client_id, tokens)

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        leader = sequence.leader
        for member in sequence.members:
            step.chunks.pop(member, None)
            self.running.remove(member)
            leader.computed_before = max(leader.computed_before, member.computed)
            self._release(member)
        if leader.group is not None:
            leader.group.collapse()
        leader.metrics.preemptions += 1
        self.preemptions += 1
        self._paused.add(leader)
        self._queue.push(leader)

    def _release(self, sequence: Sequence) -> None:
        table = sequence.table
        assert table is not None
        metrics = sequence.leader.metrics
        metrics.new_blocks += table.new_blocks
        metrics.total_blocks = metrics.new_blocks + metrics.reused_blocks
        self._cache.close(table)
        sequence.table, sequence.computed = None, 0
        sequence.context_logits.clear()


class _Step:
    """The step being put together: first who decodes, then who prefills."""

    def __init__(self, config: EngineConfig, launched: Mapping[Sequence, Chunk] | None = None) -> None:
        self._chunk_limit, self._shares = config.prefill_chunk_tokens, config.prefix_reuse
        self.budget = config.max_tokens_per_step
        """Tokens that it still takes."""
        self.chunks: dict[Sequence, Chunk] = {}
        self.launched = launched or {}
        """The step before, where that still runs."""
        self.given_up = False
        """Whether it cannot be put together before the step that still runs is read."""

    def computed(self, sequence: Sequence) -> int:
        """Return how many of its tokens are computed when the step begins."""
        chunk = self.launched.get(sequence)
        return sequence.computed if chunk is None else chunk.start + chunk.size

    def remaining(self, sequence: Sequence) -> int:
        """Return how many of its tokens must then be computed before the next one can be sampled; 0: there is none."""
        chunk = self.launched.get(sequence)
        if chunk is None:
            return sequence.remaining
        end = chunk.start + chunk.size
        return int(end < sequence.longest - 1) if chunk.samples else len(sequence.tokens) - end

    def ends(self, sequence: Sequence) -> bool:
        """Whether it ends, at the latest, with the step that still runs."""
        return sequence in self.launched and not self.remaining(sequence)

    def makes_known(self, sequence: Sequence, known: int, block_size: int) -> bool:
        """Whether the step that still runs computes a block that one that waits could share.

        Args:
            sequence: waits.
            known: how many of its tokens need not be computed as it is.
            block_size: tokens per block.
        """
        tokens, end = sequence.tokens, (known // block_size + 1) * block_size
        if not self._shares or sequence.request.sampling.context_logits or end >= len(tokens):
            return False
        prefills = (chunk for chunk in self.launched.values() if chunk.prefills and chunk.start + chunk.size >= end)
        return any(chunk.sequence.tokens[:end] == tokens[:end] for chunk in prefills)

    def give_up(self) -> None:
        """Put nothing into it."""
        self.given_up, self.budget = True, 0

    def begin_prefills(self) -> None:
        """Say that all that decode have their chunks: beside them prefills are held to their own limit."""
        if self.chunks and self._chunk_limit is not None:
            self.budget = min(self.budget, self._chunk_limit)


def _note_admission(sequence: Sequence, table: BlockTable) -> None:
    metrics = sequence.metrics
    if not metrics.first_scheduled_ns:
        metrics.first_scheduled_ns = time.time_ns()
        metrics.cached_tokens = table.cached_tokens
        metrics.reused_blocks = table.reused_blocks
