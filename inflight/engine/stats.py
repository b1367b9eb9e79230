"""EngineStats: what an engine counts, in plain numbers; nothing of how they are exported is known here.

What a metric family shows is the attribute of that name (``Family.attribute`` of ``inflight.metrics``), here or as a
property. Times of requests are ``time.time_ns()``; durations are seconds.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from inflight.engine.request import RequestMetrics
from inflight.metrics import LENGTHS, SECONDS, SHORT_SECONDS, STEP_PARTS

_NS = 1e-9


class Histogram:
    """Counts values by bucket, as Prometheus does: a value on a bound is in the bucket that ends there."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """
        Args:
            bounds: upper bounds of the buckets, rising; one more without a bound comes after them.
        """
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

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self._counts)


def process_memory() -> dict[str, int]:
    """Return the bytes of this process that are in memory (proc_pid_statm(5)), and that none are on a GPU or pinned."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {"cpu": resident * os.sysconf("SC_PAGE_SIZE"), "gpu": 0, "pinned": 0}


@dataclass(slots=True)
class EngineStats:
    """What the engine does, and has done since it was warm. What a kind of engine cannot tell stays as it begins."""

    max: int = 0
    active: int = 0
    scheduled: int = 0
    context: int = 0
    generation: int = 0
    waiting: int = 0
    running_requests: int = 0
    """Sequences in the running batch, whether or not the last step computed something of them."""
    paused: int = 0
    total_context_tokens: int = 0
    steps: int = 0
    """Those that computed something, since the engine was warm."""
    iterations: int | None = None
    """The number that the engine itself gives its last step; None: it gives none, and the steps are its count."""
    step_tokens_limit: int = 0
    kv_blocks_max: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int | None = 0
    """None: counted among the free ones."""
    kv_blocks_reused: int = 0
    tokens_per_block: int = 0
    kv_cache_reserved_blocks: int = 0
    """Among the free and the cached ones."""
    kv_cache_evictions: int = 0
    kv_cache_offloaded_blocks: int = 0
    """In the second tier now; none of the blocks that ``kv_blocks_max`` counts."""
    kv_cache_offload_blocks_limit: int = 0
    kv_cache_offloaded_tokens: int = 0
    kv_cache_restored_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    drafted_sequences: int = 0
    """Of the last step."""
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

    def set_open(self, running: int, waiting: int) -> None:
        """Say how many sequences run and wait: no figure is a difference that another thread could read halfway."""
        self.active, self.waiting, self.running_requests = running + waiting, waiting, running

    def count_scheduled(self, metrics: RequestMetrics) -> None:
        """Count a sequence that is in a step for the first time."""
        self.prompt_tokens += metrics.prompt_tokens
        self.cached_tokens += metrics.cached_tokens
        self.request_queue.observe((metrics.first_scheduled_ns - metrics.arrival_ns) * _NS)

    def count_sampled(self, metrics: RequestMetrics, generated: int, previous_ns: int) -> None:
        """Count what a sequence sampled, which ``metrics`` has already.

        Args:
            metrics: the sequence's.
            generated: tokens that came of it: 1, or 0 where it was an end id.
            previous_ns: ``last_token_ns`` before it; 0: it is the first.
        """
        self.generated_tokens += generated
        if not previous_ns:
            self.time_to_first_token.observe((metrics.first_token_ns - metrics.arrival_ns) * _NS)
            self.request_prefill.observe((metrics.first_token_ns - metrics.first_scheduled_ns) * _NS)
        elif generated:
            self.inter_token.observe((metrics.last_token_ns - previous_ns) * _NS)

    def count_end(self, metrics: RequestMetrics, now_ns: int) -> None:
        """Count a sequence that ends now, whatever its end."""
        self.request_duration.observe((now_ns - metrics.arrival_ns) * _NS)
        if metrics.first_token_ns:
            self.request_decode.observe((metrics.last_token_ns - metrics.first_token_ns) * _NS)
        self.input_token_len["total_input_tokens"].observe(metrics.prompt_tokens)
        self.output_token_len["total_output_tokens"].observe(metrics.generated_tokens)
        self.draft_tokens += metrics.draft_tokens
        self.accepted_draft_tokens += metrics.accepted_draft_tokens

    def count_step(self, sequences: int, prefill_tokens: int, decode_tokens: int, seconds: float) -> None:
        """Count a step that computed something; ``sequences``: of how many."""
        self.steps += 1
        self.step_sequences += sequences
        self.step_tokens["prefill"] += prefill_tokens
        self.step_tokens["decode"] += decode_tokens
        self.step.observe(seconds)

    @property
    def waiting_requests(self) -> int:
        """Sequences in the queue."""
        return self.waiting

    @property
    def batch_size_limit(self) -> int:
        """Sequences that may run at once."""
        return self.max

    @property
    def kv_cache_block_tokens(self) -> int:
        """Tokens that a block holds."""
        return self.tokens_per_block

    @property
    def kv_cache_blocks(self) -> dict[str, int]:
        """Every block, by its state."""
        cached = {} if self.kv_blocks_cached is None else {"cached": self.kv_blocks_cached}
        free = self.kv_blocks_max - self.kv_blocks_used - (self.kv_blocks_cached or 0)
        return {"used": self.kv_blocks_used, "free": free} | cached

    @property
    def request_metrics(self) -> dict[str, int]:
        """Upstream's counts of requests."""
        return {
            "active": self.active,
            "max": self.max,
            "scheduled": self.scheduled,
            "context": self.context,
            "waiting": self.waiting,
        }

    @property
    def kv_cache_block_metrics(self) -> dict[str, float]:
        """Upstream's counts of blocks: "free" are those that can be had, cached ones without an owner included."""
        return {
            "max": self.kv_blocks_max,
            "free": self.kv_blocks_max - self.kv_blocks_used,
            "used": self.kv_blocks_used,
            "tokens_per": self.tokens_per_block,
            "reused": self.kv_blocks_reused,
            "fraction": self.kv_blocks_used / self.kv_blocks_max if self.kv_blocks_max else 0.0,
        }

    @property
    def inflight_batcher_metrics(self) -> dict[str, int]:
        """Upstream's figures of the last step; there is one micro-batch."""
        return {
            "total_context_tokens": self.total_context_tokens,
            "generation_requests": self.generation,
            "micro_batch_id": 0,
            "paused_requests": self.paused,
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
