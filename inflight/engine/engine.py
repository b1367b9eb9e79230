"""The engine: requests in, outputs out, one step at a time. A step is three verbs: schedule, run, finish.

With speculation there is a fourth: between the first two, draft.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time

from torch import Tensor

from inflight.engine.ahead import Ahead
from inflight.engine.beam_group import BeamGroup, check_beams
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.counting import count_scheduled, count_step, learn_speed, new_stats, update
from inflight.engine.device_memory import device_memory
from inflight.engine.full_step import everything
from inflight.engine.kv.blocks import BlockCopy, CacheCounts
from inflight.engine.kv.forking import ForkingKvCache
from inflight.engine.kv.tier import TierLost
from inflight.engine.model_runner import ModelRunner
from inflight.engine.outputs import advance
from inflight.engine.request import FinishReason, Output, Request
from inflight.engine.sampler import Sampled, choose
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sequence
from inflight.engine.snapshot import Snapshot, portable_snapshot
from inflight.engine.speculate.drafter import Drafter
from inflight.engine.speculate.speculator import Speculator
from inflight.engine.speculate.verification import accept, rows
from inflight.engine.validation import check_portable, check_request
from inflight.errors import EngineFailure, InflightError
from inflight.sampling import SamplingParams
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8


class Engine:
    """In-flight batching over a paged KV cache. Not thread-safe: one thread owns it (see ``loop``)."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, tokenizer: Tokenizer | None) -> None:
        """
        Args:
            config: settings.
            runner: computes the steps.
            tokenizer: needed for stop strings only.
        """
        self._config = config
        self._runner = runner
        self._tokenizer = tokenizer
        self._cache = self._new_cache()
        self._scheduler = Scheduler(config, self._cache)
        self._sequences: dict[int, Sequence] = {}
        self._speculator = Speculator(config, runner)
        self._ahead = Ahead(runner, config.speculation.method is not None)
        self._outputs: list[Output] = []
        """Made and not yet returned: a step that raises loses none of them."""
        self._orders = itertools.count()
        self.stats = new_stats(config, runner)
        self._update_stats([])

    def _new_cache(self, counts: CacheCounts | None = None) -> ForkingKvCache:
        config = self._config
        return ForkingKvCache(
            config.num_blocks, config.block_size, config.prefix_reuse, config.eviction, self._runner.tier, counts
        )

    @classmethod
    def load(cls, config: EngineConfig, tokenizer: Tokenizer | None = None) -> Engine:
        """Load the checkpoint.

        Raises:
            DeploymentError: it cannot be served.
        """
        runner = ModelRunner(config)
        return cls(runner.config, runner, tokenizer)

    def warm_up(self) -> None:
        """Generate a few tokens for real, so that whatever is slow the first time has happened; it is not counted."""
        self._runner.warm_up()
        started = time.perf_counter()
        for request in self._warm_up_requests():
            self.submit(request)
        while self.busy:
            for output in self.step():
                if output.error is not None:
                    raise output.error
        self.stats = new_stats(self._config, self._runner)
        self._speculator.begin()
        self._scheduler.begin()
        self.stats.start_phases["warm_up"] = time.perf_counter() - started
        self._update_stats([])

    def _warm_up_requests(self) -> list[Request]:
        """Return what to begin with: a short prompt; where memory is shared out, the largest steps there are.

        On a GPU, libraries choose by size, and memory is taken once: what is served later must find it there.
        """
        greedy, budget = SamplingParams(max_tokens=_WARM_UP_TOKENS), device_memory(self._runner.device)
        longest = _WARM_UP_TOKENS if budget is None else self._config.max_tokens_per_step
        prompt = [token % self._runner.vocab_size for token in range(min(longest, self._runner.max_length - 1))]
        batch = 0 if budget is None else self._config.max_batch_size
        sampled = [Request([0], everything(_WARM_UP_TOKENS, index == 0)) for index in range(batch)]
        return [Request(prompt, greedy), *sampled]

    def draft_with(self, drafter: Drafter) -> None:
        """Have another drafter guess; with a method of speculation in the settings, whose limits hold for it."""
        self._speculator.draft_with(drafter)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._outputs)

    @property
    def due_in_s(self) -> float:
        """Seconds until a step has something to do; 0: now."""
        return 0.0 if self._outputs else self._scheduler.due_in_s

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.num_waiting

    def validate(self, request: Request) -> None:
        """Check a request against the model; safe to call from any thread.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
            UnsupportedFeature: naming what this engine does not serve.
        """
        check_request(request, self._runner.vocab_size, self._runner.max_length)
        check_beams(request, self._config, self._runner.vocab_size, self._runner.max_length)
        config = self._config
        check_portable(request, self._tokenizer is not None, config.fairness == "client", config.prefix_reuse)

    def submit(self, request: Request) -> None:
        """Put a valid request into the queue."""
        sampling = request.sampling
        if not request.arrival_ns:
            request.arrival_ns = time.time_ns()
        stops = sampling.stop_strings
        limit = StopTextLimit(self._tokenizer, stops) if self._tokenizer and stops else None
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        sequence = Sequence(request, next(self._orders), seed, self._runner.max_length, limit)
        if sampling.beam_width > 1:
            sequence.group = BeamGroup(sequence)
        self._sequences[request.key] = sequence
        self._scheduler.add(sequence)

    def cancel(self, key: int) -> None:
        """End a request; its last output comes with the next step. Unknown keys have ended already."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._outputs.append(self._end(sequence, Output(key, finish_reason=FinishReason.CANCELLED)))

    def step(self) -> list[Output]:
        """Do one step and return what is new, at most one output per sequence."""
        times = [time.perf_counter()]
        self._expire()
        chunks = self._ahead.resume(self._sequences, self._scheduler) or self._scheduler.schedule()
        times.append(time.perf_counter())
        if chunks:
            count_scheduled(self.stats, chunks)
            chunks = self._speculator.extend(chunks, self._cache)
            times.append(time.perf_counter())
            sampled, context = self._run(chunks)
            times.append(time.perf_counter())
            ran = any(chunk.sequence.table is not None for chunk in chunks)
            self._finish(chunks, sampled, context)
            times.append(time.perf_counter())
            count_step(self.stats, chunks, times)
            if ran:  # the time of a step that failed teaches nothing
                self._scheduler.count_step(chunks, times[-1] - times[0])
            if ran and self._runner.tier is not None:
                learn_speed(self._runner.tier, chunks, times[3] - times[2])
        self._update_stats(chunks)
        if not self._sequences:
            self._check_idle()
        return self._take_outputs()

    def _run(self, chunks: list[Chunk]) -> tuple[list[list[Sampled]], dict[int, Tensor]]:
        """Compute the chunks and sample.

        Returns:
            The new tokens of each chunk; and by index of chunk the context logits ``[size, vocab]`` of those that
            want them. Where it fails, it ends the chunks' sequences, and all that run where blocks were to be copied;
            where the second tier cannot restore, all that run begin again.
        """
        started, launched, copies = time.perf_counter(), self._ahead.take(), list[BlockCopy]()
        try:
            if launched is None:
                copies += self._cache.take_copies()
                logits, context = self._runner.run(chunks, copies)
                choice = choose(logits, rows(chunks))
            else:
                _, choice, context = launched
            following = self._ahead.following(chunks, self._scheduler)
            if following:
                copies += (more := self._cache.take_copies())
                self._ahead.launch(following, more, chunks, choice)
            sampled = choice.wait()
            self._speculator.observe(chunks, time.perf_counter() - started)
            return accept(chunks, sampled), context
        except TierLost:  # which is in the log; the tier is off, and what it held will be computed
            self._scheduler.preempt_all()
            return [[] for _ in chunks], {}
        except Exception as fault:
            log.exception("a step of %d sequences failed", len(chunks))
            self._cache.offloaded.clear()  # what the step was to copy there may not be there
            error = EngineFailure("the engine failed on a step; the server's log says why", fault)
            # A batch may have taken in a sequence that is computed later; its blocks may not have been filled.
            failed = [chunk.sequence for chunk in chunks] + (self._scheduler.running if copies else [])
            for sequence in dict.fromkeys(one.leader for one in failed):
                self._outputs.append(self._end(sequence, Output(sequence.request.key, error=error)))
            return [[] for _ in chunks], {}

    def _finish(self, chunks: list[Chunk], sampled: list[list[Sampled]], context: dict[int, Tensor]) -> None:
        """Book the results of the chunks whose sequences have not ended, or begun again."""
        for index, (chunk, tokens) in enumerate(zip(chunks, sampled, strict=True)):
            if chunk.sequence.table is None:
                continue
            output = self._finish_chunk(chunk, tokens, context.get(index))
            if output is not None:
                self._outputs.append(output)

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._runner.max_length

    def snapshot(self) -> Snapshot:
        """Return what it is doing, between two steps."""
        return portable_snapshot(self.stats, self._sequences.values(), self._cache)

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error`` and begin with new books; return their last outputs."""
        outputs = self._take_outputs()
        outputs += [self._count_end(one, Output(key, error=error)) for key, one in self._sequences.items()]
        preemptions = self._scheduler.preemptions
        self._cache = self._new_cache(self._cache.counts)
        self._scheduler = Scheduler(self._config, self._cache)
        self._scheduler.preemptions = preemptions
        self._speculator.reset()
        self._sequences.clear()
        self._update_stats([])
        return outputs

    def _finish_chunk(self, chunk: Chunk, sampled: list[Sampled], context: Tensor | None) -> Output | None:
        """Book one chunk's result; return its output if it has one."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.computed += chunk.size - len(chunk.drafts)
        sequence.metrics.steps += 1
        if not sampled or sampled[0].token >= 0:  # what is not a number must not be shared
            self._cache.commit(sequence.table, sequence.tokens, sequence.computed)
        if context is not None:
            sequence.context_logits.append(context[: len(sequence.request.prompt) - chunk.start].cpu().numpy())
        if not sampled:
            return None
        if sequence.group is not None:
            return self._search_on(sequence.group, sequence, sampled[0])
        output = advance(sequence, sampled, self.stats)
        if chunk.drafts:
            self._speculator.book(chunk, output, self._cache)
        return self._end(sequence, output) if output.finished else output

    def _search_on(self, group: BeamGroup, member: Sequence, sampled: Sampled) -> Output | None:
        """Book what a beam can go on with; return the search's output if it is over."""
        output = group.advance(member, sampled, self.stats)
        if output is not None:
            return self._end(group.leader, output)
        if group.stale:
            self._scheduler.adopt(group.fork(self._cache, self._config.policy == "guaranteed_no_evict"))
        return None

    def _end(self, sequence: Sequence, output: Output) -> Output:
        """Take a sequence out of the books; its blocks are free now."""
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.finish()
        if sequence.group is not None:
            sequence.group.finish(output, self.stats)
        self._scheduler.remove(sequence)
        self._speculator.forget(sequence)
        del self._sequences[sequence.request.key]
        return self._count_end(sequence, output)

    def _count_end(self, sequence: Sequence, output: Output) -> Output:
        self.stats.kv_blocks_reused += sequence.metrics.reused_blocks
        self.stats.count_end(sequence.metrics, time.time_ns())
        output.metrics = sequence.metrics
        return output

    def _expire(self) -> None:
        for sequence in self._scheduler.take_late():
            self._outputs.append(self._end(sequence, sequence.late()))

    def _update_stats(self, chunks: list[Chunk]) -> None:
        update(self.stats, chunks, len(self._sequences), self._scheduler, self._cache)

    def check(self) -> None:
        """Check the cache's books block by block, which takes time; when idle, each step checks their counts."""
        self._cache.check()

    def _check_idle(self) -> None:
        cache = self._cache
        cache.check_counts()
        self._speculator.check_idle()
        if cache.used_blocks or cache.reserved_blocks:
            log.error("idle, yet %d blocks are used and %d reserved", cache.used_blocks, cache.reserved_blocks)
