"""The scheduler: which tokens of which sequences the next step computes.

It owns the queue and the running set. One budget of tokens per step is spent in this order: running sequences decode,
one token each, but those with dear guides take turns (``guided.turns``); running prefills go on, in chunks; waiting
sequences are admitted, when the batching mode lets them. Running sequences are served by their sort key, waiting ones
in the order of their queue. There are TensorRT-LLM's two capacity policies: ``guaranteed_no_evict`` reserves a
sequence's longest possible length when it is admitted, so that it is never preempted for want of blocks;
``max_utilization`` reserves nothing, and when blocks run out it preempts the last sequence by sort key, whose tokens
are computed again later.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from inflight.clock import now_ns
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.guided.turns import MaskTurns
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.request import Request
from inflight.engine.request_queue import RequestQueue
from inflight.engine.sequence import Sequence

_BY_SORT_KEY = attrgetter("sort_key")
_GIVEN_UP_NS = 1_000_000_000
"""A sequence with a dear guide that leaves the batch waits behind those that come within this time."""
_AFTER_REFUSAL = 0.9
"""The measured time of a full step is multiplied by this whenever it refuses a prompt: a time measured on a disturbed
machine must not refuse prompts for ever."""


class Scheduler:
    """Owns the waiting and the running sequences."""

    def __init__(self, config: EngineConfig, cache: KvCacheManager, clock: Callable[[], int] = now_ns) -> None:
        """``clock`` returns the time in nanoseconds, as ``now_ns`` does."""
        self._config = config
        self._clock = clock
        self._fair = config.fairness == "client"
        self.preemptions = 0
        self._turns = MaskTurns()
        self.reset(cache)

    def reset(self, cache: KvCacheManager) -> None:
        """Forget all sequences and take a new cache. The number of preemptions stays."""
        self._cache = cache
        self._queue = RequestQueue(self._fair)
        self.running: list[Sequence] = []
        """Sorted by their sort keys; a beam search has one for each of its beams."""
        self.forget_step_times()

    def forget_step_times(self) -> None:
        """Forget how long steps took: those of the warm-up are longer than any other."""
        self._full_step_s = 0.0
        """The time of the fastest step so far that used up the budget; 0: there was none."""

    @property
    def num_waiting(self) -> int:
        """How many sequences are in the queue."""
        return len(self._queue)

    @property
    def num_paused(self) -> int:
        """How many sequences in the queue were preempted."""
        return self._queue.num_paused

    @property
    def num_running_requests(self) -> int:
        """How many requests run; a search is one, however many beams it has."""
        return len({sequence.leader for sequence in self.running})

    @property
    def due_in_s(self) -> float:
        """Seconds until there is something to do, if nothing arrives before; 0: now. It waits only for a batch to fill
        up, or for a deadline to pass."""
        seconds = self._batch_due_in_s()
        return seconds and min(seconds, self._queue.seconds_to_deadline(self._clock()))

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the queue."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that ends, wherever it is, and give its blocks back."""
        if sequence.table is not None:
            # Drafts that its last step accepted were not in the step's plan.
            self._queue.charge(sequence.request.client_id, sequence.count_served(sequence.computed))
            self._stop_running(sequence.members, sequence.release())
        self._queue.remove(sequence)

    def preempt_all(self) -> None:
        """Preempt all running sequences, because their blocks may lack their contents."""
        while self.running:
            self._preempt(self.running[-1])

    def adopt(self, forks: Iterable[Sequence]) -> None:
        """Take in forks of a sequence that runs; they have their blocks."""
        for fork in forks:
            bisect.insort(self.running, fork, key=_BY_SORT_KEY)

    def schedule(self, launched: Iterable[Chunk] = ()) -> list[Chunk]:
        """Choose the next step's chunks.

        Args:
            launched: the chunks of the step that was launched and is not read yet, if there is one. The tokens that it
                samples are unknown, so the choice assumes that only those sequences end with it that reach their
                longest length. They are charged when the step is taken from ``OverlapScheduler``.

        Returns:
            The chunks. There are none if nothing runs or waits, if a batch still fills up, or if the launched step must
            be read first, because nothing is preempted on an assumption.
        """
        plan = StepPlan(self._config, {chunk.sequence: chunk for chunk in launched})
        preempted = self._continue_running(plan)
        if not plan.launched:
            self.charge(plan.chunks.values())
        if self._queue and not (plan.abandoned or preempted) and self._may_admit():
            self._admit_waiting(plan)
        return [] if plan.abandoned else list(plan.chunks.values())

    def take_expired(self) -> list[Sequence]:
        """Return, once, the sequences whose deadline has passed, or would pass before their first token."""
        return self._queue.take_expired(self._clock())

    def observe_step(self, tokens: int, seconds: float) -> None:
        """Learn from a step of so many tokens that took ``seconds``."""
        self._turns.observe(seconds)
        if tokens == self._config.max_tokens_per_step:
            self._full_step_s = min(self._full_step_s or seconds, seconds)

    def _continue_running(self, plan: StepPlan) -> bool:
        """Plan the chunks of the running sequences; return whether one was preempted for them."""
        preemptions, prefills, decoding = self.preemptions, list[Sequence](), list[Sequence]()
        for sequence in self.running:
            remaining = plan.progress(sequence)[1]
            if remaining:
                (prefills if remaining > 1 else decoding).append(sequence)
        left_out = self._turns.left_out(decoding)
        for sequence in decoding:
            if plan.budget and sequence not in left_out:
                self._continue(sequence, plan.progress(sequence)[0], 1, plan)
        limit = self._config.prefill_chunk_tokens
        if plan.chunks and limit is not None:  # a limit of prefills beside decodes, which have their chunks now
            plan.budget = min(plan.budget, limit)
        for sequence in prefills:
            if plan.budget:
                start, remaining = plan.progress(sequence)
                self._continue(sequence, start, min(remaining, plan.budget), plan)
        return self.preemptions > preemptions

    def _continue(self, sequence: Sequence, start: int, count: int, plan: StepPlan) -> None:
        table = sequence.table
        if table is None:  # preempted in this very step
            return
        count = self._cache.chunk_size(table, start, count)
        if not count:  # it waits for a step with more room, and so does whoever is behind it
            plan.budget = 0
            return
        while not self._cache.grow(table, start + count):
            if plan.launched:
                plan.abandon()
                return
            for member in self._preempt(self.running[-1]):
                plan.chunks.pop(member, None)
            if sequence.table is None:
                return
        plan.chunks[sequence] = Chunk(sequence, start, count, awaits=start == len(sequence.tokens))
        plan.budget -= count

    def _batch_due_in_s(self) -> float:
        config, queue = self._config, self._queue
        if config.mode != "dynamic" or self.running or not 0 < len(queue) < config.max_batch_size:
            return 0.0
        waited_ns = self._clock() - min(sequence.request.arrival_ns for sequence in queue)
        return max(0.0, config.max_queue_delay_ms / 1e3 - waited_ns / 1e9)

    def _may_admit(self) -> bool:
        """Whether sequences may join now: at any time, or only when a new batch forms."""
        return self._config.mode == "inflight" or not (self.running or self._batch_due_in_s())

    def _admit_waiting(self, plan: StepPlan) -> None:
        batches = self._config.mode != "inflight"  # a batch is admitted at once, with or without budget for its chunks
        staying = [one for one in self.running if not plan.will_end(one)] if plan.launched else self.running
        if len(staying) >= self._config.max_batch_size and not plan.launched:
            self._make_room(plan)
        if len(staying) >= self._config.max_batch_size:
            return
        free_rows = self._config.max_batch_size - sum(sequence.batch_rows for sequence in staying)
        while self._queue and (batches or plan.budget):
            sequence = self._queue.first
            if sequence.batch_rows > free_rows:
                return
            if not self._admit(sequence, plan):
                if any(plan.will_end(member) for member in self.running):
                    plan.abandon()  # the blocks that these free may admit it into this step
                return
            free_rows -= sequence.batch_rows if sequence.table is not None else 0

    def _make_room(self, plan: StepPlan) -> None:
        """Have sequences that take turns, and have had one, leave the batch to those that wait."""
        others = sum(not self._turns.is_dear(one) for one in self._queue)
        leaving = [one for one in self.running if one not in plan.chunks and self._turns.may_leave(one)]
        for sequence in leaving[:others]:
            self._turns.leaves(sequence)
            self._stop_running(sequence.members, sequence.leader.preempt())
            self.preemptions += 1
            sequence.give_place_up(self._clock() + _GIVEN_UP_NS)
            self._queue.push(sequence)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Have the first sequence of the queue run, or let it expire; return whether there was room."""
        request = sequence.request
        match = self._cache.match(sequence.tokens, not sequence.reads_prompt, len(request.prompt))
        if plan.will_cache_prefix_of(sequence, match.num_tokens):
            plan.abandon()
            return False
        capacity = self._capacity(sequence, match.num_tokens, plan)
        if not self._cache.has_room(match, capacity):
            return False
        if self._is_too_late(sequence, match.num_tokens):
            self._full_step_s *= _AFTER_REFUSAL
            self._queue.expire_first()
            return True
        sequence.admit(self._cache.admit(match, capacity, request.retention))
        self._queue.pop()
        bisect.insort(self.running, sequence, key=_BY_SORT_KEY)
        count = min(sequence.remaining, plan.budget)
        if count:
            self._continue(sequence, sequence.computed, count, plan)
            self.charge([plan.chunks[sequence]] if sequence in plan.chunks else [])
        return True

    def _capacity(self, sequence: Sequence, num_cached: int, plan: StepPlan) -> int:
        """Return the tokens for which there must be room to admit a sequence; ``num_cached`` of them are cached."""
        if self._config.policy == "guaranteed_no_evict":
            size = self._cache.block_size
            return max_blocks(sequence.request, sequence.longest, size) * size
        tokens = len(sequence.tokens)
        return min(tokens, num_cached + plan.budget) if self._config.mode == "inflight" else tokens

    def _is_too_late(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether the full steps that the prompt needs would end after the deadline, each as fast as the fastest."""
        deadline = sequence.request.deadline_ns
        steps = (len(sequence.tokens) - num_cached) // self._config.max_tokens_per_step
        if deadline is None or sequence.metrics.first_token_ns or sequence.generated:
            return False
        return self._clock() + steps * self._full_step_s * 1e9 > deadline

    def charge(self, chunks: Iterable[Chunk]) -> None:
        """Charge the clients for the chunks' tokens, but not again for those that a preemption has lost."""
        if not self._fair:
            return
        served: dict[str, int] = defaultdict(int)
        for sequence, start, size, *_ in chunks:
            if new := sequence.count_served(start + size):
                served[sequence.request.client_id] += new
        for client_id, tokens in served.items():
            self._queue.charge(client_id, tokens)

    def _preempt(self, sequence: Sequence) -> list[Sequence]:
        """Put a sequence, with all beams of its search, back into the queue; return the sequences that stop running."""
        leader, members = sequence.leader, sequence.members
        self._stop_running(members, leader.preempt())
        self.preemptions += 1
        self._queue.push(leader)
        return members

    def _stop_running(self, members: list[Sequence], tables: list[BlockTable]) -> None:
        for member in members:
            self.running.remove(member)
        for table in tables:
            self._cache.free(table)


class StepPlan:
    """The chunks chosen for the next step so far, and what is left of its budget."""

    def __init__(self, config: EngineConfig, launched: Mapping[Sequence, Chunk]) -> None:
        self._config = config
        self.budget = config.max_tokens_per_step
        """Tokens that the step can still take."""
        self.chunks: dict[Sequence, Chunk] = {}
        self.launched = launched
        """The chunks of the step that still runs, by sequence; empty: none runs."""
        self.abandoned = False
        """Whether the step that still runs must be read before this one can be planned."""

    def progress(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many tokens of a sequence are computed when the step begins, and how many remain.

        The remaining ones are those before the next token can be sampled; 0: the sequence ends.
        """
        chunk = self.launched.get(sequence) if self.launched else None
        if chunk is None:
            table = sequence.table
            computed = 0 if table is None else table.num_computed
            return computed, len(sequence.tokens) - computed
        end = chunk.start + chunk.size
        if not chunk.samples:
            return end, len(sequence.tokens) - end
        return end, int(end < sequence.longest - 1)  # the sampled token remains, unless it is the last one

    def will_end(self, sequence: Sequence) -> bool:
        """Whether the step that still runs makes the sequence's last possible token."""
        return sequence in self.launched and not self.progress(sequence)[1]

    def will_cache_prefix_of(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether the step that still runs computes a waiting sequence's next block after its cached ones."""
        tokens, size = sequence.tokens, self._config.block_size
        end = (num_cached // size + 1) * size
        if not self._config.prefix_reuse or sequence.reads_prompt or end >= len(tokens):
            return False
        prefills = (chunk for chunk in self.launched.values() if chunk.prefills and chunk.start + chunk.size >= end)
        return any(chunk.sequence.tokens[:end] == tokens[:end] for chunk in prefills)

    def abandon(self) -> None:
        """Plan nothing until the step that still runs is read."""
        self.abandoned, self.budget = True, 0


def max_blocks(request: Request, length: int, block_size: int) -> int:
    """Return the blocks that a request may hold at most.

    A beam search holds the full blocks of the prompt once and all others once per beam; one more per beam is for the
    copy of a block that several beams are about to write into. ``length``: its tokens of prompt and output, at most.
    """
    blocks, width = -(-length // block_size), request.sampling.beam_width
    if width == 1:
        return blocks
    shared = len(request.prompt) // block_size
    return shared + width * (blocks - shared + 1)
