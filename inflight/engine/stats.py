"""EngineStats: what an engine counts, in plain numbers. This module does not know how they are exported.

What has happened is counted here. What the engine holds is an ``EngineState``, which the engine makes anew after each
step. Any thread may read at any time. A metric family shows the attribute that its ``MetricFamily.source``
in ``inflight.metrics`` names. Times of requests are ``inflight.clock.now_ns()``; durations are seconds.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from inflight.engine.request import RequestMetrics
from inflight.metrics import LENGTHS, SECONDS, SHORT_SECONDS, STEP_PARTS

_NS = 1e-9


class Histogram:
    """Counts values by bucket, as Prometheus does: a value on a bound is in the bucket that ends there."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds``: upper bounds of the buckets, rising; one more without a bound comes after them."""
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values were not above it, then how many there were in all."""
        return list(accumulate(self._counts))


def process_memory() -> dict[str, int]:
    """Return this process's resident bytes (proc_pid_statm(5)), with none on a GPU and none pinned."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {"cpu": resident * os.sysconf("SC_PAGE_SIZE"), "gpu": 0, "pinned": 0}


class StepCounts(NamedTuple):
    """What a step computed."""

    sequences: int = 0
    prefills: int = 0
    """How many of the sequences were prefilled, at least in part."""
    decodes: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    """The tokens of both kinds that were computed before a preemption."""
    drafted: int = 0
    """How many of the sequences had drafts."""

    @property
    def tokens(self) -> int:
        """All tokens that it computed."""
        return self.prefill_tokens + self.decode_tokens


NO_STEP = StepCounts()
"""What an idle engine shows as its last step."""


class Stopwatch:
    """Times the consecutive parts of a step, in seconds."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """End a part, which began when the one before it ended."""
        now = time.perf_counter()
        self.parts[part], self._last = now - self._last, now

    @property
    def seconds(self) -> float:
        """The time from the beginning to the end of the last part."""
        return self._last - self._began


class EngineState(NamedTuple):
    """What an engine holds at one moment. What a kind of engine does not know keeps its default."""

    active: int = 0
    """The requests that have not ended."""
    waiting: int = 0
    running: int = 0
    """The requests in the running batch, whether or not the last step computed something of them."""
    paused: int = 0
    """Those of the waiting requests that were preempted."""
    step: StepCounts = NO_STEP
    """The last step."""
    preemptions: int = 0
    """How many there were so far."""
    kv_blocks_max: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int | None = 0
    """None: counted among the free ones."""
    kv_blocks_reserved: int = 0
    """Among the free and the cached ones."""
    tokens_per_block: int = 0
    evictions: int = 0
    """Cached blocks forgotten so far."""
    offloaded_blocks: int = 0
    """In the offload pool now; none of the blocks that ``kv_blocks_max`` counts."""
    offload_blocks_limit: int = 0
    offloaded_tokens: int = 0
    """Moved to the offload pool so far."""
    restored_tokens: int = 0
    """Brought back from it so far."""


def _now(read: Callable[[EngineState], Any]) -> Any:
    """Return a property of ``EngineStats`` that reads the engine's state."""
    return property(lambda stats: read(stats.state()))


@dataclass(slots=True)
class EngineStats:
    """What the engine has done since it was warm. What a kind of engine does not know keeps its default."""

    state: Callable[[], EngineState] = EngineState
    """Returns what the engine held after its last step."""
    batch_size_limit: int = 0
    """Sequences that may run at once."""
    step_tokens_limit: int = 0
    steps: int = 0
    """Steps that computed something since the engine was warm."""
    iterations: int | None = None
    """The number that the engine itself gives its last step; None: it gives none, and the steps are its count."""
    kv_blocks_reused: int = 0
    resumed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    step_sequences: int = 0
    step_tokens: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    step: Histogram = field(default_factory=partial(Histogram, SHORT_SECONDS))
    step_part: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    input_token_len: dict[str, Histogram] = field(default_factory=lambda: {"total_input_tokens": Histogram(LENGTHS)})
    output_token_len: dict[str, Histogram] = field(default_factory=lambda: {"total_output_tokens": Histogram(LENGTHS)})
    request_queue: Histogram = field(default_factory=partial(Histogram, SECONDS))
    request_prefill: Histogram = field(default_factory=partial(Histogram, SECONDS))
    request_decode: Histogram = field(default_factory=partial(Histogram, SECONDS))
    time_to_first_token: Histogram = field(default_factory=partial(Histogram, SECONDS))
    request_duration: Histogram = field(default_factory=partial(Histogram, SECONDS))
    inter_token: Histogram = field(default_factory=partial(Histogram, SHORT_SECONDS))
    start_phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the engine's start, by phase."""
    memory: Callable[[], dict[str, int]] = process_memory
    """Returns bytes, by kind: ``cpu``, ``gpu``, ``pinned``."""

    waiting_requests = _now(lambda state: state.waiting)
    running_requests = _now(lambda state: state.running)
    drafted_sequences = _now(lambda state: state.step.drafted)
    preemptions = _now(lambda state: state.preemptions)
    kv_cache_block_tokens = _now(lambda state: state.tokens_per_block)
    kv_cache_reserved_blocks = _now(lambda state: state.kv_blocks_reserved)
    kv_cache_evictions = _now(lambda state: state.evictions)
    kv_cache_offloaded_blocks = _now(lambda state: state.offloaded_blocks)
    kv_cache_offload_blocks_limit = _now(lambda state: state.offload_blocks_limit)
    kv_cache_offloaded_tokens = _now(lambda state: state.offloaded_tokens)
    kv_cache_restored_tokens = _now(lambda state: state.restored_tokens)

    def count_scheduled(self, metrics: RequestMetrics) -> None:
        """Count a sequence that is in a step for the first time."""
        self.prompt_tokens += metrics.prompt_tokens
        self.cached_tokens += metrics.cached_tokens
        self.request_queue.observe((metrics.first_scheduled_ns - metrics.arrival_ns) * _NS)

    def count_sampled(self, metrics: RequestMetrics, generated: int, previous_ns: int) -> None:
        """Count what a sequence sampled, which its ``metrics`` have already.

        ``generated`` tokens came of it: 1, or 0 where it was an end id. ``previous_ns`` is ``last_token_ns`` before it;
        0: it is the first.
        """
        self.generated_tokens += generated
        if not previous_ns:
            self.time_to_first_token.observe((metrics.first_token_ns - metrics.arrival_ns) * _NS)
            self.request_prefill.observe((metrics.first_token_ns - metrics.first_scheduled_ns) * _NS)
        elif generated:
            self.inter_token.observe((metrics.last_token_ns - previous_ns) * _NS)

    def count_end(self, metrics: RequestMetrics, now_ns: int) -> None:
        """Count a sequence that ends now for whatever reason."""
        self.request_duration.observe((now_ns - metrics.arrival_ns) * _NS)
        if metrics.first_token_ns:
            self.request_decode.observe((metrics.last_token_ns - metrics.first_token_ns) * _NS)
        self.input_token_len["total_input_tokens"].observe(metrics.prompt_tokens)
        self.output_token_len["total_output_tokens"].observe(metrics.generated_tokens)
        self.draft_tokens += metrics.draft_tokens
        self.accepted_draft_tokens += metrics.accepted_draft_tokens

    def count_step(self, step: StepCounts, seconds: float, parts: Mapping[str, float] = {}) -> None:
        """Count a step that computed something; ``parts``: the seconds of its parts."""
        self.steps += 1
        self.step_sequences += step.sequences
        self.step_tokens["prefill"] += step.prefill_tokens
        self.step_tokens["decode"] += step.decode_tokens
        self.recomputed_tokens += step.recomputed_tokens
        for part, spent in parts.items():
            self.step_part[part] += spent
        self.step.observe(seconds)

    @property
    def kv_cache_blocks(self) -> dict[str, int]:
        """Every block, by its state."""
        now = self.state()
        cached = {} if now.kv_blocks_cached is None else {"cached": now.kv_blocks_cached}
        free = now.kv_blocks_max - now.kv_blocks_used - (now.kv_blocks_cached or 0)
        return {"used": now.kv_blocks_used, "free": free} | cached

    @property
    def request_metrics(self) -> dict[str, int]:
        """Upstream's counts of requests."""
        now = self.state()
        return {
            "active": now.active,
            "max": self.batch_size_limit,
            "scheduled": now.step.sequences,
            "context": now.step.prefills,
            "waiting": now.waiting,
        }

    @property
    def kv_cache_block_metrics(self) -> dict[str, float]:
        """Upstream's counts of blocks: "free" are those that can be had, cached ones without an owner included."""
        now = self.state()
        return {
            "max": now.kv_blocks_max,
            "free": now.kv_blocks_max - now.kv_blocks_used,
            "used": now.kv_blocks_used,
            "tokens_per": now.tokens_per_block,
            "reused": self.kv_blocks_reused,
            "fraction": now.kv_blocks_used / now.kv_blocks_max if now.kv_blocks_max else 0.0,
        }

    @property
    def inflight_batcher_metrics(self) -> dict[str, int]:
        """Upstream's figures of the last step; there is only one micro-batch."""
        now = self.state()
        return {
            "total_context_tokens": now.step.prefill_tokens,
            "generation_requests": now.step.decodes,
            "micro_batch_id": 0,
            "paused_requests": now.paused,
        }

    @property
    def general_metrics(self) -> dict[str, int]:
        """Upstream's clock, in microseconds since the epoch, and its count of steps."""
        iterations = self.steps if self.iterations is None else self.iterations
        return {"timestamp": time.time_ns() // 1000, "iteration_counter": iterations}

    @property
    def runtime_memory_metrics(self) -> dict[str, int]:
        """Bytes, by kind."""
        return self.memory()
