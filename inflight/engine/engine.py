"""The engine: requests in, outputs out, one step at a time: schedule, draft (with speculation), run, finish."""

from __future__ import annotations

import itertools
import logging
import time
from typing import NamedTuple

from inflight.clock import now_ns
from inflight.engine.beam_search.group import BeamGroup, check_beams
from inflight.engine.chunk import Chunk, count_chunks
from inflight.engine.config import EngineConfig
from inflight.engine.device import device_memory
from inflight.engine.guided.pending import POLL_S, PendingGuides, pending_guides
from inflight.engine.kvcache.blocks import BlockCopy, CacheCounts, StateCopy
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.kvcache.offload_pool import OffloadPoolLost
from inflight.engine.kvcache.states import StateSlots
from inflight.engine.model_runner import ModelRunner
from inflight.engine.overlap import LaunchedStep, OverlapScheduler
from inflight.engine.prompt_outputs import PromptPart
from inflight.engine.recurrent import check_beam_width
from inflight.engine.request import FinishReason, Output, Request, check_guide, check_portable, check_request
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Sampled, Sequence
from inflight.engine.sizing import warm_up_requests
from inflight.engine.snapshot import Snapshot, portable_snapshot
from inflight.engine.speculate.speculator import Speculator
from inflight.engine.speculate.verification import accepted_and_bonus_tokens, sampling_rows
from inflight.engine.stats import NO_STEP, EngineState, EngineStats, StepCounts, Stopwatch
from inflight.errors import EngineFailure, InflightError
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """What a step has computed."""

    sampled: list[list[Sampled]]
    """The new tokens of each chunk."""
    parts: dict[int, PromptPart]
    """By index of chunk what its request asks of its prompt, of those that ask for something."""


class StepFailed(NamedTuple):
    """A step that failed: nothing that it computed is used."""

    fault: Exception | None
    """The exception; None: the offload pool could not restore blocks and has been turned off."""
    copied: bool
    """Whether the step had blocks to copy. Any running sequence may share such a block, which may lack its contents."""


class Engine:
    """In-flight batching over a paged KV cache. Not thread-safe: one thread owns it (see ``loop``)."""

    def __init__(self, runner: ModelRunner, tokenizer: Tokenizer | None) -> None:
        """``runner`` computes the steps, and has the settings; ``tokenizer`` is needed for stop strings only."""
        self._config = config = runner.config
        self._runner = runner
        self._tokenizer = tokenizer
        self._cache = self._new_cache()
        self._scheduler = Scheduler(config, self._cache)
        self._sequences: dict[int, Sequence] = {}
        """The requests that have not ended, by key; of a beam search, the leader."""
        self._searches: dict[int, BeamGroup] = {}
        """The beam searches among them, by the request's key."""
        guided = config.guided_decoding
        self._guides = None if tokenizer is None else pending_guides(tokenizer, runner.vocab_size, guided)
        speculates = config.speculation.method is not None
        self._speculator = Speculator(config, runner) if speculates else None
        # Drafts are guessed from tokens on the host, so that speculation leaves nothing to launch ahead.
        self._overlap = OverlapScheduler(runner, self._scheduler) if runner.overlaps and not speculates else None
        self._outputs: list[Output] = []
        """Outputs that ``step`` has not returned yet. They are kept here so that a step that raises loses none."""
        self._orders = itertools.count()
        self.stats = self._new_stats()
        self._update_state(NO_STEP)

    def _new_cache(self, counts: CacheCounts | None = None) -> KvCacheManager:
        config = self._config
        sizes, states = (config.num_blocks, config.block_size), None
        if self._runner.is_recurrent:
            snapshots, interval = config.state_snapshots or 0, config.state_snapshot_tokens
            states = StateSlots(config.max_batch_size, snapshots, config.block_size, interval)
        return KvCacheManager(
            *sizes, config.prefix_reuse, config.eviction, self._runner.offload_pool, counts, states=states
        )

    def _new_stats(self) -> EngineStats:
        return EngineStats(
            lambda: self._state,
            batch_size_limit=self._config.max_batch_size,
            step_tokens_limit=self._config.max_tokens_per_step,
            start_phases=dict(self._runner.start_phases),
            memory=self._runner.memory,
        )

    @classmethod
    def load(cls, config: EngineConfig, tokenizer: Tokenizer | None = None) -> Engine:
        """Load the checkpoint.

        Raises:
            DeploymentError: it cannot be served.
        """
        return cls(ModelRunner(config), tokenizer)

    def warm_up(self) -> None:
        """Serve a few requests, so that whatever is slow the first time has happened. The metrics do not count them."""
        self._runner.warm_up()
        if self._guides is not None:
            self._guides.warm_up()
        started = time.perf_counter()
        on_gpu = device_memory(self._runner.device) is not None
        for request in warm_up_requests(self._config, on_gpu, self._runner.vocab_size, self._runner.max_length):
            self.submit(request)
        while self.busy:
            for output in self.step():
                if output.error is not None:
                    raise output.error
        self.stats = self._new_stats()
        if self._speculator is not None:
            self._speculator.reset_controller()
        self._scheduler.forget_step_times()
        self.stats.start_phases["warm_up"] = time.perf_counter() - started

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._outputs)

    @property
    def due_in_s(self) -> float:
        """Seconds until a step has something to do; 0: now."""
        if self._outputs:
            return 0.0
        seconds, idle = self._scheduler.due_in_s, not (self._scheduler.running or self._scheduler.num_waiting)
        return min(seconds or POLL_S, POLL_S) if self._num_compiling and (seconds or idle) else seconds

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that wait for their guides."""
        return self._scheduler.num_waiting + self._num_compiling

    @property
    def _num_compiling(self) -> int:
        return 0 if self._guides is None else len(self._guides.waiting)

    def validate(self, request: Request) -> None:
        """Check a request against the model; safe to call from any thread.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
            UnsupportedFeature: naming what this engine does not serve.
        """
        config, vocab_size, max_length = self._config, self._runner.vocab_size, self._runner.max_length
        check_request(request, vocab_size, max_length)
        check_beams(request, config, vocab_size, max_length)
        check_portable(request, self._tokenizer is not None, config.prefix_reuse, self._runner.has_head)
        check_guide(request, vocab_size, config.guided_decoding.max_guide_bytes)
        if self._runner.is_recurrent:
            check_beam_width(request.sampling.beam_width)

    def submit(self, request: Request) -> None:
        """Put a valid request into the queue."""
        sampling, seed = request.sampling, request.begin()
        stops = sampling.stop_strings
        limit = StopTextLimit(self._tokenizer, stops) if self._tokenizer and stops else None
        aging_ns = self._config.priority_aging_ns
        sequence = Sequence(request, next(self._orders), seed, self._runner.max_length, limit, aging_ns)
        if request.resumed_ids and (error := sequence.resume(self.stats)) is not None:
            self._outputs.append(Output(request.key, error=error))
            return
        if sampling.beam_width > 1:
            self._searches[request.key] = BeamGroup(sequence)
        self._sequences[request.key] = sequence
        if sampling.guide is not None and self._guides is not None:
            self._guides.add(sequence)
        else:
            self._scheduler.add(sequence)

    def cancel(self, key: int) -> None:
        """End a request; its last output comes with the next step. Unknown keys have ended already."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, Output(key, finish_reason=FinishReason.CANCELLED))

    def step(self) -> list[Output]:
        """Do one step and return what is new, at most one output per sequence."""
        watch = Stopwatch()
        launched, chunks = self._schedule()
        step = NO_STEP
        watch.lap("schedule")
        if chunks:
            if self._speculator is not None:
                chunks = self._speculator.add_drafts(chunks, self._cache)
                watch.lap("draft")
            result = self._run(chunks, launched)
            watch.lap("run")
            self._finish(chunks, result)
            watch.lap("finish")
            step = count_chunks(chunks)
            self._count_step(step, isinstance(result, StepResult), watch)
        if not self._sequences:
            self._check_idle()
            step = NO_STEP  # the metrics of an idle engine do not show its last step
        self._update_state(step)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _schedule(self) -> tuple[LaunchedStep | None, list[Chunk]]:
        """End the requests that cannot be served in time; return the step launched ahead, if any, and its chunks."""
        for sequence in self._scheduler.take_expired():
            self._end(sequence, sequence.expiry_output())
        if self._guides is not None and self._guides.waiting:
            self._take_guided(self._guides)
        launched = None if self._overlap is None else self._overlap.take(self._sequences)
        chunks = self._scheduler.schedule() if launched is None else launched.chunks
        for chunk in chunks:
            chunk.sequence.count_scheduled(self.stats)
        return launched, chunks

    def _take_guided(self, guides: PendingGuides) -> None:
        """Put the requests whose guides are ready into the queue; end those whose guides are refused."""
        for sequence, outcome in guides.take(now_ns()):
            if isinstance(outcome, Output):
                self._end(sequence, outcome)
            else:
                sequence.obey(outcome)
                self._scheduler.add(sequence)

    def _run(self, chunks: list[Chunk], launched: LaunchedStep | None) -> StepResult | StepFailed:
        """Compute the chunks and sample, unless that is launched; launch the next step, if it is known; read this one.

        Both steps fail together: a fault while the next one is launched ends this one's sequences too.
        """
        started, copies = time.perf_counter(), list[BlockCopy | StateCopy]()
        try:
            if launched is None:
                copies = [*self._cache.take_copies(), *self._cache.take_state_copies()]
                logits, parts = self._runner.run(chunks, copies)
                own = [chunk.sequence for chunk in chunks if chunk.samples]
                rows = own if self._speculator is None else sampling_rows(chunks)
                launched = LaunchedStep(chunks, self._runner.sample(logits, rows), parts)
            if self._overlap is not None and (following := self._overlap.following(chunks)):
                next_copies = self._cache.take_copies()
                copies = [*copies, *next_copies]
                self._overlap.launch(following, next_copies, launched)
            sampled = launched.pending.wait()
            if self._speculator is not None:
                self._speculator.observe(chunks, time.perf_counter() - started)
                return StepResult(accepted_and_bonus_tokens(chunks, sampled), launched.parts)
            tokens = iter(sampled)
            return StepResult([[next(tokens)] if chunk.samples else [] for chunk in chunks], launched.parts)
        except OffloadPoolLost:  # it is logged; the pool is off, and the tokens of its blocks will be computed
            return StepFailed(None, bool(copies))
        except Exception as fault:
            log.exception("a step of %d sequences failed", len(chunks))
            return StepFailed(fault, bool(copies))

    def _finish(self, chunks: list[Chunk], result: StepResult | StepFailed) -> None:
        """Give the step's results to the sequences. A failed step ends or preempts them."""
        if isinstance(result, StepFailed):
            self._fail_step(chunks, result)
            return
        for index, (chunk, tokens) in enumerate(zip(chunks, result.sampled, strict=True)):
            if chunk.sequence.table is not None:  # None: another beam has ended the search in this step
                self._finish_chunk(chunk, tokens, result.parts.get(index))

    def _finish_chunk(self, chunk: Chunk, sampled: list[Sampled], part: PromptPart | None) -> None:
        """Give one chunk's results to its sequence."""
        sequence, table = chunk.sequence, chunk.sequence.table
        assert table is not None
        sequence.count_step()
        # Where no token could be sampled, the logits may be NaN, and so may keys and values: other sequences must not
        # find them in the prefix cache.
        if not sampled or sampled[0].error is None:
            self._cache.commit(table, sequence.tokens, chunk.start + chunk.size - len(chunk.drafts))
        if part is not None:
            sequence.prompt_record.add(part)
        if not sampled:
            if (output := sequence.pooled_output()) is not None:
                self._end(sequence, output)
            return
        if sequence.request.sampling.beam_width > 1:
            self._advance_beam(sequence, sampled[0])
            return
        output = sequence.advance(sampled, self.stats)
        if chunk.drafts and self._speculator is not None:
            self._speculator.commit_accepted(chunk, output, self._cache)
        if output.finished:
            self._end(sequence, output)
        else:
            self._outputs.append(output)

    def _advance_beam(self, member: Sequence, sampled: Sampled) -> None:
        """Give a beam's candidates to its beam search, which then may end or fork."""
        search = self._searches[member.request.key]
        output = search.advance(member, sampled, self.stats)
        if output is not None:
            self._end(member.leader, output)
        elif search.must_fork:
            self._scheduler.adopt(search.fork(self._cache, self._config.policy == "guaranteed_no_evict"))

    def _fail_step(self, chunks: list[Chunk], step: StepFailed) -> None:
        """End the sequences of a failed step, or all running ones if it had blocks to copy.

        Copies fill blocks that running sequences without a chunk in this step may share: such a block may now hold
        uninitialized keys and values. If only the offload pool was lost, all running sequences are preempted instead.
        """
        if step.fault is None:
            self._scheduler.preempt_all()
            return
        self._cache.forget_copied()
        error = EngineFailure("the engine failed on a step; the server's log says why", step.fault)
        failed = [chunk.sequence for chunk in chunks] + (self._scheduler.running if step.copied else [])
        for leader in dict.fromkeys(sequence.leader for sequence in failed):
            self._end(leader, Output(leader.request.key, error=error))

    def _end(self, sequence: Sequence, output: Output) -> None:
        """End a request for whatever reason: queue its last output and free its blocks."""
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.finish()
        search = self._searches.pop(sequence.request.key, None)
        if search is not None:
            search.finish(output, self.stats)
        self._scheduler.remove(sequence)
        if self._guides is not None and self._guides.waiting:
            self._guides.discard(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
        del self._sequences[sequence.request.key]
        self.stats.kv_blocks_reused += sequence.metrics.reused_blocks
        self.stats.count_end(sequence.metrics, now_ns())
        output.metrics = sequence.metrics
        self._outputs.append(output)

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error``, with a new cache and an empty scheduler; return their last outputs."""
        self._cache = self._new_cache(self._cache.counts)
        self._scheduler.reset(self._cache)
        if self._speculator is not None:
            self._speculator.reset()
        for key, sequence in list(self._sequences.items()):
            sequence.release()
            output = Output(key, error=error)
            try:
                self._end(sequence, output)
            except Exception:  # what has made the engine fail may raise here again, and each request must get an end
                log.exception("request %d is ended without its text, beams and counts", key)
                self._outputs.append(output)
        self._sequences, self._searches = {}, {}
        self._update_state(NO_STEP)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _count_step(self, step: StepCounts, ran: bool, watch: Stopwatch) -> None:
        self.stats.count_step(step, watch.seconds, watch.parts)
        if not ran:  # the time of a failed step must not be learned
            return
        self._scheduler.observe_step(step.tokens, watch.seconds)
        if self._runner.offload_pool is not None and step.prefill_tokens > step.decode_tokens:
            seconds = watch.parts["run"] * step.prefill_tokens / step.tokens
            self._runner.offload_pool.rule.observe_compute(step.prefill_tokens, seconds)

    @property
    def max_sequence_length(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._runner.max_length

    def snapshot(self) -> Snapshot:
        """Return the state of its requests and of the cache, between two steps."""
        return portable_snapshot(self.stats, self._sequences.values(), self._cache)

    def _update_state(self, step: StepCounts) -> None:
        """Show what the engine holds as one value that does not change, because other threads read it at any time."""
        scheduler, cache = self._scheduler, self._cache
        self._state = EngineState(
            active=len(self._sequences), waiting=self.num_waiting, running=scheduler.num_running_requests,
            paused=scheduler.num_paused, preemptions=scheduler.preemptions, step=step,
            kv_blocks_max=cache.num_blocks, kv_blocks_used=cache.num_used_blocks,
            kv_blocks_cached=cache.num_cached_blocks, kv_blocks_reserved=cache.num_reserved_blocks,
            tokens_per_block=cache.block_size, evictions=cache.counts.evictions,
            offloaded_blocks=len(cache.offloaded) if cache.offloaded.capacity else 0,
            offload_blocks_limit=cache.offloaded.capacity,
            offloaded_tokens=cache.counts.offloaded_tokens, restored_tokens=cache.counts.restored_tokens,
        )  # fmt: skip

    def _check_idle(self) -> None:
        cache = self._cache
        cache.check_counts()
        if self._speculator is not None:
            self._speculator.check_idle()
        if cache.states is not None and cache.states.num_running:
            log.error("idle, yet %d recurrent states are of sequences", cache.states.num_running)
        if cache.num_used_blocks or cache.num_reserved_blocks:
            log.error("idle, yet %d blocks are used and %d reserved", cache.num_used_blocks, cache.num_reserved_blocks)
