"""ReplayEngine: answers with the prompt's own tokens, over and over, without a model.

It takes the engine's place where the stages around it are measured or tested. It costs next to no time itself, and its
delays are set: since they are known, measured latencies and capacities can be compared with their true values.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from inflight.clock import now_ns
from inflight.engine.config import EngineConfig
from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.engine.snapshot import Snapshot, snapshot
from inflight.engine.stats import NO_STEP, EngineState, EngineStats, StepCounts
from inflight.errors import InflightError, UnsupportedFeature
from inflight.sampling import asked_beside

_HONOURED = ("max_tokens", "end_ids", "ignore_eos", "seed")
"""The sampling parameters that a replay obeys, or that every request has and that mean nothing to it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The set delays of a replay. A request's times depend on them alone and not on other requests."""

    queue_s: float = 0.0
    """From arrival to the time it may be scheduled, at the earliest."""
    prefill_s: float = 0.0
    """From being scheduled to the first token."""
    step_s: float = 0.0
    """From each token to the next. If the other delays are 0, all running requests get a token at each tick of one
    clock, as from an engine with steps of this length. A tick that was missed is skipped."""


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that has not ended."""

    request: Request
    metrics: RequestMetrics
    due_ns: int = 0
    """When its next token comes, once it has a place in the batch."""


class ReplayEngine:
    """A ``SteppedEngine``: a step gives one token to each running request that has one due.

    Each time is computed from when the event before was due, not from when it happened: delays do not add up. With
    n tokens per request, the capacity is ``max_batch_size / (prefill_s + (n - 1) * step_s)`` requests per second.
    """

    def __init__(self, config: EngineConfig, pace: Pace = Pace(), clock: Callable[[], int] = now_ns) -> None:
        """It reads only ``max_batch_size`` of ``config``; ``clock`` returns nanoseconds."""
        self._queue_ns, self._prefill_ns, self._step_ns = (
            round(1e9 * seconds) for seconds in (pace.queue_s, pace.prefill_s, pace.step_s)
        )
        self._on_ticks = not (self._queue_ns or self._prefill_ns)
        self._clock = clock
        self._waiting: deque[_OpenRequest] = deque()
        self._running: dict[int, _OpenRequest] = {}
        self._free_places = [0] * config.max_batch_size
        """A heap: for each free place in the batch the time since when it is free."""
        self._ended: list[Output] = []
        self._state = EngineState()
        """The state after the last step."""
        self.stats = EngineStats(lambda: self._state, batch_size_limit=config.max_batch_size)

    max_sequence_length = None
    """It has no limit of its own."""

    @property
    def busy(self) -> bool:
        """Whether there is anything that a step now or later would do."""
        return bool(self._running or self._waiting or self._ended)

    @property
    def due_in_s(self) -> float:
        """Seconds until a step has something to do; 0: now."""
        if self._ended or not self.busy or (self._on_ticks and not self._step_ns):
            return 0.0
        due = [running.due_ns for running in self._running.values()]
        if self._waiting and self._free_places:
            due.append(self._next_start_ns())
        return max(0, min(due) - self._clock()) / 1e9

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def validate(self, request: Request) -> None:
        """Refuse inputs that a replay would ignore. Raises UnsupportedFeature: naming what."""
        asked = dict.fromkeys(asked_beside(request.sampling, _HONOURED), True)
        asked |= {"deadline_ms": request.deadline_ns is not None, "priority": request.priority != 0}
        asked["lora_name"] = request.lora is not None
        for name, given in asked.items():
            if given:
                raise UnsupportedFeature(f"{name} is not supported by the replay engine")

    def submit(self, request: Request) -> None:
        """Take a request."""
        request.arrival_ns = request.arrival_ns or self._clock()
        metrics = RequestMetrics(request.arrival_ns, prompt_tokens=len(request.prompt))
        metrics.resumed_tokens = len(request.resumed_ids)
        self.stats.resumed_requests += bool(request.resumed_ids)
        self._waiting.append(_OpenRequest(request, metrics))

    def cancel(self, key: int) -> None:
        """End a request; its last output comes with the next step. Unknown keys have ended already."""
        for one in self._open():
            if one.request.key == key:
                self._ended.append(self._end(one, Output(key, finish_reason=FinishReason.CANCELLED), self._clock()))

    def step(self) -> list[Output]:
        """Give one token to each running request whose next token is due."""
        began, now = time.perf_counter(), self._clock()
        self._schedule(now)
        outputs, self._ended = self._ended, []
        due = [running for running in self._running.values() if running.due_ns <= now]
        scheduled = len(self._running)
        context = sum(not running.metrics.generated_tokens for running in self._running.values())
        prompts = [len(running.request.prompt) for running in due if not running.metrics.generated_tokens]
        outputs += [self._give(running, now) for running in due]
        if due:
            decodes = len(due) - len(prompts)
            step = StepCounts(len(due), len(prompts), decodes, sum(prompts), decodes)
            self.stats.count_step(step, time.perf_counter() - began)
        running, waiting, shown = len(self._running), len(self._waiting), NO_STEP
        if self.busy:  # the metrics of an idle engine do not show its last step
            shown = StepCounts(scheduled, context, scheduled - context, sum(prompts))
        self._state = EngineState(active=running + waiting, waiting=waiting, running=running, step=shown)
        return outputs

    def snapshot(self) -> Snapshot:
        """Return the state of its requests, between two steps."""
        requests = [(one.request, one.metrics, one.request.key not in self._running) for one in self._open()]
        return snapshot(self.stats, requests, kv_cache=None)

    def fail_all(self, error: InflightError) -> list[Output]:
        """End every request with ``error``."""
        outputs, self._ended, now = self._ended, [], self._clock()
        outputs += [self._end(one, Output(one.request.key, error=error), now) for one in self._open()]
        self._state = EngineState()
        return outputs

    def _open(self) -> list[_OpenRequest]:
        """Return the requests that have not ended: those that run, then those that wait."""
        return [*self._running.values(), *self._waiting]

    def _schedule(self, now: int) -> None:
        """Give free places to those that have waited long enough, in the order of arrival."""
        while self._waiting and self._free_places and (start := self._next_start_ns()) <= now:
            heapq.heappop(self._free_places)
            one = self._waiting.popleft()
            one.metrics.first_scheduled_ns = start
            self.stats.count_scheduled(one.metrics)
            one.due_ns = self._next_tick(start) if self._on_ticks else start + self._prefill_ns
            self._running[one.request.key] = one

    def _next_start_ns(self) -> int:
        """Return when the first request that waits gets the next free place."""
        return max(self._waiting[0].request.arrival_ns + self._queue_ns, self._free_places[0])

    def _next_tick(self, after: int) -> int:
        return (after // self._step_ns + 1) * self._step_ns if self._step_ns else after

    def _give(self, one: _OpenRequest, now: int) -> Output:
        """Give one token."""
        request, metrics, due = one.request, one.metrics, one.due_ns
        place = metrics.resumed_tokens + metrics.generated_tokens
        output = Output(request.key, [request.prompt[place % len(request.prompt)]], metrics=metrics)
        one.due_ns = self._next_tick(now) if self._on_ticks else due + self._step_ns
        previous_ns = metrics.last_token_ns
        metrics.generated_tokens += 1
        metrics.last_token_ns = self._clock()
        metrics.first_token_ns = metrics.first_token_ns or metrics.last_token_ns
        self.stats.count_sampled(metrics, 1, previous_ns)
        if place + 1 == request.sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH
            self._end(one, output, due)
        return output

    def _end(self, one: _OpenRequest, output: Output, at_ns: int) -> Output:
        """End a request and return its last output; its place, if it has one, is free from ``at_ns`` on."""
        if self._running.pop(output.key, None) is not None:
            heapq.heappush(self._free_places, at_ns)
        else:
            self._waiting.remove(one)
        self.stats.count_end(one.metrics, self._clock())
        output.metrics = one.metrics
        return output
