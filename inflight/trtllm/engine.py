"""TrtLlmEngine: TensorRT-LLM behind the interface of the portable engine, so that all around it is the same.

What ends a sequence (end ids, stop strings and sequences, limits, deadlines) is decided here, by the same
``Sequence`` as in the portable engine, on the tokens that come; TensorRT-LLM is told of what it can end itself.
Requests beyond its batch wait here, in the same ``RequestQueue``: its own queue knows no priorities.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from inflight.clock import now_ns
from inflight.engine.request import FinishReason, Output, Request, check_request
from inflight.engine.request_queue import RequestQueue
from inflight.engine.sequence import Sequence
from inflight.engine.snapshot import Snapshot, counted_cache, snapshot
from inflight.engine.stats import EngineState, EngineStats
from inflight.errors import EngineFailure, InflightError, InvalidRequest, UnsupportedFeature, nearest
from inflight.sampling import SamplingParams
from inflight.settings.deployment import Deployment
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm import reading
from inflight.trtllm.arguments import max_open_requests, max_sequence_length, sampler
from inflight.trtllm.request_arguments import check
from inflight.trtllm.runtime import Event, Runtime
from inflight.trtllm.watchdog import Watchdog

log = logging.getLogger(__name__)

_PATIENCE_S = 0.002
"""How long a step waits for the first event: what is asked meanwhile waits as long."""
_WARM_UP_TOKENS = 2
_FAILURES_IN_A_ROW = 8
"""Of requests, before TensorRT-LLM must show that it can still generate a token."""
_PROBE = -1
"""The key of the generation by which it shows that; no request has it."""


class TrtLlmEngine:
    """A ``SteppedEngine``. Not thread-safe: one thread owns it, but for ``validate``."""

    due_in_s = 0.0
    """A step waits for TensorRT-LLM by itself."""

    def __init__(
        self,
        deployment: Deployment,
        tokenizer: Tokenizer,
        runtime: Runtime,
        arguments_of: Callable[[Request], dict[str, Any]],
        watchdog: Watchdog,
    ) -> None:
        """``arguments_of`` makes the arguments of ``generate_async``, in the runtime's thread."""
        self._deployment = deployment
        self._tokenizer = tokenizer
        self._runtime = runtime
        self._arguments_of = arguments_of
        self._watchdog = watchdog
        self._sampler = sampler(deployment)
        self.max_sequence_length = max_sequence_length(deployment)
        """Most tokens of a prompt and its output together."""
        self._failures = 0
        """Requests that failed since anything was generated."""
        self._iteration: Any = None
        """The newest iteration that was seen; another is progress."""
        self._sequences: dict[int, Sequence] = {}
        self._running: dict[int, int] = {}
        """When each of those that TensorRT-LLM has was handed to it, ``inflight.clock.now_ns()``, by key."""
        self._queue = RequestQueue(deployment.batching.fairness == "client")
        self._outputs: list[Output] = []
        self._skips_iterations = False
        """Between the warm-up and the first request: what the warm-up ran may be reported late, and is not counted."""
        self._idle = True
        """Whether the statistics show that nothing is open: a generation may end between two looks at it."""
        self._orders = itertools.count()
        self._state = EngineState(kv_blocks_cached=None)
        """What it held after the last step."""
        self.stats = self._new_stats()

    def _new_stats(self) -> EngineStats:
        return EngineStats(
            lambda: self._state,
            batch_size_limit=max_open_requests(self._deployment),
            memory=lambda: reading.memory_of(self._runtime.iteration),
        )

    def warm_up(self) -> None:
        """Generate a few tokens for real, which are not counted; from then on the watchdog is armed.

        Raises:
            InflightError: what the generation ended with.
        """
        started = time.perf_counter()
        self.submit(self._trial(_WARM_UP_TOKENS))
        while self.busy:
            for output in self.step():
                if output.error is not None:
                    raise output.error
        self._watchdog.arm()
        self._skips_iterations = True
        self.stats = self._new_stats()
        self.stats.start_phases["warm_up"] = time.perf_counter() - started
        self._update_stats()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything: what was aborted is followed until TensorRT-LLM has ended it too."""
        return bool(self._sequences or self._outputs or not (self._idle or self._watchdog.dead))

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def validate(self, request: Request) -> None:
        """Check a request; safe to call from any thread.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
            UnsupportedFeature: naming what this deployment does not serve.
            EngineFailure: the engine is dead.
        """
        if self._watchdog.dead:
            raise EngineFailure(self._watchdog.message)
        check_request(request, self._tokenizer.config.vocab_size, self.max_sequence_length)
        check(request.sampling, self._sampler, self._deployment.speculation.method)
        settings = self._deployment.tensorrt_llm
        if request.sampling.guide is not None and settings.guided_decoding is None:
            raise UnsupportedFeature(
                "guided_decoding_guide_type is not supported by this deployment; set tensorrt_llm.guided_decoding"
            )
        if request.retention and not self._deployment.kv_cache.prefix_reuse:
            raise UnsupportedFeature("retention_* is not supported by this deployment; its KV cache reuses no prefixes")
        if request.lora is not None and request.lora not in settings.lora:
            known = ", ".join(settings.lora) or "none"
            hint = nearest(request.lora, settings.lora)
            raise InvalidRequest(f"lora_name is {request.lora!r}; this deployment has: {known}{hint}")

    def submit(self, request: Request) -> None:
        """Put a valid request into the queue."""
        request.arrival_ns = request.arrival_ns or now_ns()
        stop_strings = request.sampling.stop_strings
        stops = StopTextLimit(self._tokenizer, stop_strings) if stop_strings else None
        aging_ns = self._deployment.batching.priority_aging_ns
        sequence = Sequence(request, next(self._orders), 0, self.max_sequence_length, stops, aging_ns)
        self._sequences[request.key] = sequence
        self._queue.add(sequence)

    def cancel(self, key: int) -> None:
        """End a request; its last output comes with the next step. Unknown keys have ended already."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, Output(key, finish_reason=FinishReason.CANCELLED))

    def step(self) -> list[Output]:
        """Hand waiting requests over, and return what is new."""
        if not self._watchdog.dead:
            for sequence in self._queue.take_expired(now_ns()):
                self._end(sequence, sequence.expiry_output())
            self._admit()
            if self._running or not self._runtime.idle:
                self._listen()
        if self._watchdog.dead:  # what was valid just before is failed too
            return self.fail_all(EngineFailure(self._watchdog.message))
        self._update_stats()
        return self._take_outputs()

    def _listen(self) -> None:
        """Take what TensorRT-LLM gives, and ask the watchdog; errors and silence are no progress, iterations are."""
        for event in self._runtime.take(_PATIENCE_S):
            if event.fatal:
                self._watchdog.declare_dead("TensorRT-LLM has failed (the server's log says why)")
            elif event.error is None:
                self._watchdog.progress()
            self._count_failure(event)
            if event.key in self._running:  # else it has ended here, before TensorRT-LLM knew
                self._advance_alone(self._sequences[event.key], event)
        if (iteration := self._runtime.iteration.get("iter")) != self._iteration:
            self._iteration = iteration
            self._watchdog.progress()
        if self._running or self._failures >= _FAILURES_IN_A_ROW:  # what was aborted may be dropped without a word
            self._watchdog.check()

    def _count_failure(self, event: Event) -> None:
        """Count what fails in a row: a step that fails ends its requests alone, and the next may fail as well.

        Bad requests look the same. So TensorRT-LLM is asked for a token in between, and is dead if it gives none.
        """
        if event.error is None:
            self._failures = 0 if event.tokens else self._failures
        elif event.key == _PROBE:
            self._watchdog.declare_dead("TensorRT-LLM fails every request (the server's log says why)")
        else:
            self._failures += 1
            if self._failures == _FAILURES_IN_A_ROW:
                self._runtime.generate(_PROBE, partial(self._arguments_of, self._trial(1)))

    def _trial(self, tokens: int) -> Request:
        return Request([0], SamplingParams(tokens, ignore_eos=True))

    def snapshot(self) -> Snapshot:
        """Return what it is doing, between two steps; of the KV cache the counts of the last iteration."""
        requests = [(one.request, one.metrics, key not in self._running) for key, one in self._sequences.items()]
        return snapshot(self.stats, requests, counted_cache(self.stats))

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error``; return their last outputs."""
        for sequence in list(self._sequences.values()):
            self._end(sequence, Output(sequence.request.key, error=error))
        self._update_stats()
        return self._take_outputs()

    def close(self) -> None:
        """Stop TensorRT-LLM. A dead one is left to the end of its process: it would not come back."""
        if not self._watchdog.dead:
            self._runtime.close()

    def _admit(self) -> None:
        while (
            self._queue and self._runtime.open < self.stats.batch_size_limit
        ):  # more would wait behind those that were aborted
            sequence = self._queue.pop()
            request = sequence.request
            if self._skips_iterations:
                self._skips_iterations = False
                self._runtime.take_iterations()
            if not self._runtime.open:
                self._watchdog.progress()
            self._running[request.key] = now_ns()
            self._charge(sequence)
            self._runtime.generate(request.key, partial(self._arguments_of, request))

    def _charge(self, sequence: Sequence) -> None:
        """Count a sequence's tokens as served to its client: the prompt when it is handed over, then each that comes.

        What of a prompt TensorRT-LLM has cached is not known by then, and counts as the rest does.
        """
        self._queue.charge(sequence.request.client_id, sequence.count_served(len(sequence.tokens)))

    def _advance_alone(self, sequence: Sequence, event: Event) -> None:
        """Book one event; one that cannot be booked ends its own sequence and no other."""
        try:
            self._advance(sequence, event)
        except Exception:
            key = sequence.request.key
            log.exception("a response of TensorRT-LLM for request %d could not be read: %s", key, event)
            error = EngineFailure("the engine gave a response that cannot be read; the server's log says more")
            self._end(sequence, Output(key, error=error), over=event.finish_reason is not None)

    def _advance(self, sequence: Sequence, event: Event) -> None:
        """Book one event; where its tokens end the sequence, what comes after them is dropped."""
        output, metrics = Output(sequence.request.key, error=event.error, metrics=sequence.metrics), sequence.metrics
        refused = isinstance(event.error, InvalidRequest)
        if not refused:
            reading.read_metrics(metrics, event, self._running[sequence.request.key])
            sequence.count_scheduled(self.stats)
        for index, token in enumerate(event.tokens):
            before = sequence.generated
            output.finish_reason = sequence.append(token, self.stats)
            if sequence.generated > before:
                reading.report(output, sequence.request.sampling, event, index)
            if output.finish_reason is not None:
                break
        self._charge(sequence)
        if event.context_logits is not None:
            output.context_logits = event.context_logits
            reading.require_whole(output, len(sequence.request.prompt))
        if output.finish_reason is None and event.finish_reason is not None:
            output.finish_reason = reading.FINISH_REASONS[event.finish_reason]
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.limit
        if output.finished:
            self._end(sequence, output, over=event.finish_reason is not None)
        elif output.tokens:
            self._outputs.append(output)

    def _end(self, sequence: Sequence, output: Output, over: bool = False) -> None:
        """End a request, whatever its end: its last output goes out; ``over``: TensorRT-LLM has ended it too."""
        key = sequence.request.key
        if sequence.stop_text is not None:
            output.text_limit = sequence.stop_text.finish()
        output.metrics = sequence.metrics
        self.stats.count_end(sequence.metrics, now_ns())
        del self._sequences[key]
        self._queue.remove(sequence)
        if key in self._running:
            del self._running[key]
            if not over:
                self._runtime.abort(key)
        self._outputs.append(output)

    def _take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def _update_stats(self) -> None:
        for iteration in self._runtime.take_iterations():
            if not self._skips_iterations:
                reading.count_iteration(self.stats, iteration)
        self._idle = self._runtime.idle
        iteration, waiting, running = self._runtime.iteration, len(self._queue), len(self._running)
        reading.read_counts(self.stats, iteration)
        self._state = reading.state_of(self._state, iteration, waiting, running, self._idle)
