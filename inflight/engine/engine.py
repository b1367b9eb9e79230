"""The engine: requests in, outputs out, one step at a time. A step is three verbs: schedule, run, finish."""

from __future__ import annotations

import itertools
import logging
import secrets
import time

import numpy as np
from torch import Tensor

from inflight.engine.config import EngineConfig
from inflight.engine.kv_cache import KvCache
from inflight.engine.model_runner import ModelRunner
from inflight.engine.request import FinishReason, Output, Request
from inflight.engine.sampler import Sampled, sample
from inflight.engine.scheduler import Chunk, Scheduler
from inflight.engine.sequence import Sequence
from inflight.engine.stats import EngineStats
from inflight.engine.validation import check_request
from inflight.errors import EngineFailure, InflightError, InvalidRequest, UnsupportedFeature
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
        self._cache = KvCache(config.num_blocks, config.block_size, config.prefix_reuse)
        self._scheduler = Scheduler(config, self._cache)
        self._sequences: dict[int, Sequence] = {}
        self._with_deadline: set[int] = set()
        self._outputs: list[Output] = []
        """Made and not yet returned: a step that raises loses none of them."""
        self._orders = itertools.count()
        self.stats = EngineStats(
            max=config.max_batch_size, kv_blocks_max=config.num_blocks, tokens_per_block=config.block_size
        )

    @classmethod
    def load(cls, config: EngineConfig, tokenizer: Tokenizer | None = None) -> Engine:
        """Load the checkpoint.

        Raises:
            DeploymentError: it cannot be served.
        """
        return cls(config, ModelRunner(config), tokenizer)

    def warm_up(self) -> None:
        """Generate a few tokens for real, so that whatever is slow the first time has happened."""
        prompt = [token % self._runner.vocab_size for token in range(min(_WARM_UP_TOKENS, self._runner.max_length - 1))]
        self.submit(Request(prompt, SamplingParams(max_tokens=2)))
        while self.busy:
            for output in self.step():
                if output.error is not None:
                    raise output.error
        self.stats.total_context_tokens = self.stats.iterations = 0

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._outputs)

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
        for name, given in (("guided_decoding_guide_type", request.sampling.guide), ("lora_name", request.lora)):
            if given:
                raise UnsupportedFeature(f"{name} is not supported by the portable engine")
        if request.sampling.stop_strings and self._tokenizer is None:
            raise InvalidRequest("stop_strings: this engine has no tokenizer")

    def submit(self, request: Request) -> None:
        """Put a valid request into the queue."""
        sampling = request.sampling
        if not request.arrival_ns:
            request.arrival_ns = time.time_ns()
        stops = (
            StopTextLimit(self._tokenizer, sampling.stop_strings) if self._tokenizer and sampling.stop_strings else None
        )
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        sequence = Sequence(request, next(self._orders), seed, self._runner.max_length, stops)
        self._sequences[request.key] = sequence
        if request.deadline_ns is not None:
            self._with_deadline.add(request.key)
        self._scheduler.add(sequence)

    def cancel(self, key: int) -> None:
        """End a request; its last output comes with the next step. Unknown keys have ended already."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._outputs.append(self._end(sequence, Output(key, finish_reason=FinishReason.CANCELLED)))

    def step(self) -> list[Output]:
        """Do one step and return what is new, at most one output per sequence."""
        self._expire()
        chunks = self._scheduler.schedule()
        if chunks:
            self.stats.iterations += 1
            self._run(chunks)
        self._update_stats(chunks)
        if not self._sequences:
            self._check_idle()
        return self._take_outputs()

    def _run(self, chunks: list[Chunk]) -> None:
        """Compute the chunks and book their results; where that fails, it ends their sequences and no others."""
        try:
            logits, context = self._runner.run(chunks, self._cache.take_copies())
            sampled = iter(sample(logits, [chunk.sequence for chunk in chunks if chunk.samples]))
        except Exception:
            log.exception("a step of %d sequences failed", len(chunks))
            error = EngineFailure("the engine failed on a step; the server's log says why")
            for chunk in chunks:
                self._outputs.append(self._end(chunk.sequence, Output(chunk.sequence.request.key, error=error)))
            return
        for index, chunk in enumerate(chunks):
            output = self._finish(chunk, next(sampled) if chunk.samples else None, context.get(index))
            if output is not None:
                self._outputs.append(output)

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error`` and begin with new books; return their last outputs."""
        outputs = self._take_outputs() + [Output(key, error=error) for key in self._sequences]
        config = self._config
        self._cache = KvCache(config.num_blocks, config.block_size, config.prefix_reuse)
        self._scheduler = Scheduler(config, self._cache)
        self._sequences.clear()
        self._with_deadline.clear()
        self._update_stats([])
        return outputs

    def _finish(self, chunk: Chunk, sampled: Sampled | None, context: Tensor | None) -> Output | None:
        """Book one chunk's result; return its output if it has one."""
        sequence = chunk.sequence
        assert sequence.table is not None
        sequence.computed += chunk.size
        if sampled is None or sampled.token >= 0:  # what is not a number must not be shared
            self._cache.commit(sequence.table, sequence.tokens, sequence.computed)
        if context is not None:
            sequence.context_logits.append(context[: len(sequence.request.prompt) - chunk.start].cpu().numpy())
        if sampled is None:
            return None
        output = Output(sequence.request.key)
        if sampled.token < 0:
            output.error = EngineFailure("the model's logits are not numbers")
            return self._end(sequence, output)
        before = sequence.generated
        output.finish_reason = sequence.append(sampled.token)
        if sequence.generated > before:
            _report(output, sequence, sampled)
        if sequence.context_logits:
            output.context_logits = np.concatenate(sequence.context_logits)
            sequence.context_logits.clear()
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.limit
        return output if output.finish_reason is None else self._end(sequence, output)

    def _end(self, sequence: Sequence, output: Output) -> Output:
        """Take a sequence out of the books; its blocks are free now."""
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.finish()
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.key]
        self._with_deadline.discard(sequence.request.key)
        self.stats.kv_blocks_reused += sequence.metrics.reused_blocks
        output.metrics = sequence.metrics
        return output

    def _expire(self) -> None:
        now = time.time_ns()
        for key in list(self._with_deadline):
            sequence = self._sequences[key]
            output = sequence.overdue(now)
            if output is not None:
                self._outputs.append(self._end(sequence, output))

    def _check_idle(self) -> None:
        cache = self._cache
        cache.check()
        if cache.used_blocks or cache.reserved_blocks:
            log.error("idle, yet %d blocks are used and %d reserved", cache.used_blocks, cache.reserved_blocks)

    def _update_stats(self, chunks: list[Chunk]) -> None:
        stats, cache = self.stats, self._cache
        chunks = chunks if self._sequences else []  # what an idle engine shows is not its last step
        stats.active = len(self._sequences)
        stats.scheduled = len(chunks)
        prefills = [chunk for chunk in chunks if chunk.start < len(chunk.sequence.request.prompt)]
        stats.context, stats.generation = len(prefills), len(chunks) - len(prefills)
        stats.waiting = self._scheduler.num_waiting
        stats.paused = sum(bool(sequence.metrics.preemptions) for sequence in self._scheduler.waiting)
        stats.total_context_tokens = sum(chunk.size for chunk in prefills)
        stats.kv_blocks_used, stats.kv_blocks_cached = cache.used_blocks, cache.cached_blocks


def _report(output: Output, sequence: Sequence, sampled: Sampled) -> None:
    """Put the new token, and what was asked about it, into the output."""
    sampling = sequence.request.sampling
    output.tokens = [sampled.token]
    if sampling.log_probs:
        output.log_probs = [sampled.log_prob]
    if sampling.top_log_probs:
        output.top_log_probs = [sampled.top]
    if sampled.logits is not None:
        output.generation_logits = [sampled.logits]
