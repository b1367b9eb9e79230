"""The scheduler: which tokens of which sequences the next step computes.

It owns the queue and the running set. The policy, in order: running sequences decode, one token each; running prefills
go on, in chunks; waiting sequences are admitted, when the mode of batching lets them. All under one budget of tokens
per step; running sequences by their sort key, waiting ones as their queue has them. Two policies of capacity,
upstream's: ``guaranteed_no_evict`` reserves a sequence's longest possible length when it is admitted, so that it never
has to stop; ``max_utilization`` reserves nothing, and when blocks run out the last sequence by sort key gives its
blocks back and is computed again later.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request_queue import RequestQueue
from inflight.engine.sequence import Chunk, Sequence, max_blocks

_BY_SORT_KEY = attrgetter("sort_key")
_AFTER_REFUSAL = 0.9
"""The known time of a full step is multiplied by this when a prompt is refused because of it: a time that was taken
while the machine was disturbed must not refuse prompts for ever."""


class Scheduler:
    """Owns the waiting and the running sequences."""

    def __init__(self, config: EngineConfig, cache: KvCacheManager, clock: Callable[[], int] = time.time_ns) -> None:
        """``clock`` returns the time in nanoseconds, as ``time.time_ns`` does."""
        self._config = config
        self._clock = clock
        self._fair = config.fairness == "client"
        self.preemptions = 0
        self.reset(cache)

    def reset(self, cache: KvCacheManager) -> None:
        """Begin anew with a new cache: nothing waits or runs. Preemptions are counted on."""
        self._cache = cache
        self._queue = RequestQueue(self._fair)
        self.running: list[Sequence] = []
        """By sort key; of a search, all its beams."""
        self.forget_step_times()

    def forget_step_times(self) -> None:
        """Forget how long steps took: those of the warm-up are longer than any other."""
        self._full_step_s = 0.0
        """The time of the fastest step so far that used up the budget; 0: there was none."""

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
        return sum(bool(sequence.metrics.preemptions) for sequence in self.waiting) if self.preemptions else 0

    @property
    def num_running_requests(self) -> int:
        """How many requests run; a search is one, however many beams it has."""
        return len({sequence.leader for sequence in self.running})

    @property
    def due_in_s(self) -> float:
        """Seconds until there is something to do, if nothing arrives before; 0: now. Only a batch that fills up waits,
        for more requests or for a deadline to pass."""
        seconds = self._batch_due_in_s()
        return seconds and min(seconds, self._queue.seconds_to_deadline(self._clock()))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ends, wherever it is, and give its blocks back."""
        if sequence.table is not None:
            self._stop_running(sequence.members, sequence.release())
        self._queue.remove(sequence)

    def preempt_all(self) -> None:
        """Have all running sequences begin again: their blocks do not hold what they should."""
        while self.running:
            self._preempt(self.running[-1])

    def adopt(self, forks: Iterable[Sequence]) -> None:
        """Take in forks of a sequence that runs; they have their blocks."""
        for fork in forks:
            bisect.insort(self.running, fork, key=_BY_SORT_KEY)

    def schedule(self, launched: Iterable[Chunk] = ()) -> list[Chunk]:
        """Choose the next step's chunks. Empty when nothing runs or waits, or a batch still fills up.

        Args:
            launched: the chunks of the step before, where that still runs: those that sample make a token that the host
                has not read. The choice is then what it would be once that step is read, should no sequence end that
                need not; empty: that step must be read first. No sequence is preempted for it, and one that goes on is
                charged for it when the step is resumed, see ``charge``.
        """
        step = _Step(self._config, {chunk.sequence: chunk for chunk in launched})
        preemptions = self.preemptions
        self._continue_running(step)
        if not step.launched:
            self.charge(step.chunks.values())
        if self._queue and not step.given_up and self.preemptions == preemptions and self._may_admit():
            self._admit_waiting(step)
        return [] if step.given_up else list(step.chunks.values())

    def take_expired(self) -> list[Sequence]:
        """Return, once, the sequences whose deadline has passed, or would pass before their first token."""
        return self._queue.take_expired(self._clock())

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Learn from a step of so many tokens that took ``seconds``."""
        if tokens == self._config.max_tokens_per_step:
            self._full_step_s = min(self._full_step_s or seconds, seconds)

    def _continue_running(self, step: _Step) -> None:
        prefills = []
        for sequence in list(self.running):
            start, remaining = step.progress(sequence)
            if remaining > 1:
                prefills.append(sequence)
            elif remaining and step.budget:
                self._continue(sequence, start, 1, step)
        limit = self._config.prefill_chunk_tokens
        if step.chunks and limit is not None:  # all that decode have their chunks: prefills have a limit beside them
            step.budget = min(step.budget, limit)
        for sequence in prefills:
            if step.budget:
                start, remaining = step.progress(sequence)
                self._continue(sequence, start, min(remaining, step.budget), step)

    def _continue(self, sequence: Sequence, start: int, count: int, step: _Step) -> None:
        table = sequence.table
        if table is None:  # preempted in this very step
            return
        while not self._cache.grow(table, start + count):
            if step.launched:
                step.give_up()
                return
            for member in self._preempt(self.running[-1]):
                step.chunks.pop(member, None)
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
        staying = [sequence for sequence in self.running if not step.ends(sequence)] if step.launched else self.running
        if len(staying) >= self._config.max_batch_size:
            return
        free_slots = self._config.max_batch_size - sum(sequence.num_slots for sequence in staying)
        while self._queue and (batches or step.budget):
            sequence = self._queue.first
            if sequence.num_slots > free_slots:
                return
            if not self._admit(sequence, step):
                if any(step.ends(member) for member in self.running):
                    step.give_up()  # they leave blocks
                return
            free_slots -= sequence.num_slots if sequence.table is not None else 0

    def _admit(self, sequence: Sequence, step: _Step) -> bool:
        """Have the first sequence of the queue run, or let it expire; return whether there was room."""
        match = self._cache.match(sequence.tokens, reuse=not sequence.request.sampling.context_logits)
        if step.makes_known(sequence, match.tokens):
            step.give_up()
            return False
        capacity = self._capacity(sequence, match.tokens, step)
        if not self._cache.has_room(match, capacity):
            return False
        if self._is_too_late(sequence, match.tokens):
            self._full_step_s *= _AFTER_REFUSAL
            self._queue.expire_first()
            return True
        sequence.admit(self._cache.admit(match, capacity, sequence.request.retention))
        self._queue.pop()
        bisect.insort(self.running, sequence, key=_BY_SORT_KEY)
        count = min(sequence.remaining, step.budget)
        if count:
            self._continue(sequence, sequence.computed, count, step)
            self.charge([step.chunks[sequence]])
        return True

    def _capacity(self, sequence: Sequence, known: int, step: _Step) -> int:
        """Return the tokens for which there must be room to admit a sequence of which so many are known."""
        if self._config.policy == "guaranteed_no_evict":
            size = self._cache.block_size
            return max_blocks(sequence.request, sequence.longest, size) * size
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
        for sequence, start, size, *_ in chunks:
            if new := sequence.count_served(start + size):
                served[sequence.request.client_id] += new
        for client_id, tokens in served.items():
            self._queue.charge(client_id, tokens)

    def _preempt(self, sequence: Sequence) -> list[Sequence]:
        """Have a sequence wait again, and with it all beams of its search; return those that no longer run."""
        leader, members = sequence.leader, sequence.members
        self._stop_running(members, leader.preempt())
        self.preemptions += 1
        self._queue.push(leader)
        return members

    def _stop_running(self, members: list[Sequence], tables: list[BlockTable]) -> None:
        for member in members:
            self.running.remove(member)
        for table in tables:
            self._cache.close(table)


class _Step:
    """The step being put together: first who decodes, then who prefills."""

    def __init__(self, config: EngineConfig, launched: Mapping[Sequence, Chunk]) -> None:
        self._config = config
        self.budget = config.max_tokens_per_step
        """Tokens that it still takes."""
        self.chunks: dict[Sequence, Chunk] = {}
        self.launched = launched
        """The step before, where that still runs."""
        self.given_up = False
        """Whether it cannot be put together before the step that still runs is read."""

    def progress(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many of its tokens are computed when the step begins, and how many must then be computed.

        The second number counts up to the token that lets the next one be sampled; 0: there is no next one.
        """
        chunk = self.launched.get(sequence) if self.launched else None
        if chunk is None:
            table = sequence.table
            computed = 0 if table is None else table.num_computed
            return computed, len(sequence.tokens) - computed
        end = chunk.start + chunk.size
        return end, int(end < sequence.longest - 1) if chunk.samples else len(sequence.tokens) - end

    def ends(self, sequence: Sequence) -> bool:
        """Whether it ends, at the latest, with the step that still runs."""
        return sequence in self.launched and not self.progress(sequence)[1]

    def makes_known(self, sequence: Sequence, known: int) -> bool:
        """Whether the step that still runs computes a block that ``sequence``, which waits, could share.

        ``known``: how many of its tokens need not be computed as it is.
        """
        tokens, size = sequence.tokens, self._config.block_size
        end = (known // size + 1) * size
        if not self._config.prefix_reuse or sequence.request.sampling.context_logits or end >= len(tokens):
            return False
        prefills = (chunk for chunk in self.launched.values() if chunk.prefills and chunk.start + chunk.size >= end)
        return any(chunk.sequence.tokens[:end] == tokens[:end] for chunk in prefills)

    def give_up(self) -> None:
        """Put nothing into it."""
        self.given_up, self.budget = True, 0
