"""What the engine counts of its steps: from the books of their owners into ``EngineStats``."""

from __future__ import annotations

from collections.abc import Sequence as Rows

from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.kv.tier import KvTier
from inflight.engine.kv_cache import KvCache
from inflight.engine.model_runner import ModelRunner
from inflight.engine.scheduler import Scheduler
from inflight.engine.stats import EngineStats


def new_stats(config: EngineConfig, runner: ModelRunner) -> EngineStats:
    """Return the stats of an engine that has done nothing yet."""
    return EngineStats(
        max=config.max_batch_size,
        step_tokens_limit=config.max_tokens_per_step,
        kv_blocks_max=config.num_blocks,
        tokens_per_block=config.block_size,
        start_phases=dict(runner.start_phases),
        memory=runner.memory,
    )


def count_scheduled(stats: EngineStats, chunks: Rows[Chunk]) -> None:
    """Count the sequences that are in a step for the first time."""
    for chunk in chunks:
        if not chunk.sequence.counted:
            chunk.sequence.counted = True
            stats.count_scheduled(chunk.sequence.metrics)


def count_step(stats: EngineStats, chunks: Rows[Chunk], times: Rows[float]) -> None:
    """Count a step; ``times``: of its beginning and of each part's end, in seconds."""
    for part, begin, end in zip(stats.step_part, times, times[1:], strict=False):
        stats.step_part[part] += end - begin
    prefill = sum(chunk.size for chunk in chunks if chunk.prefills)
    stats.count_step(len(chunks), prefill, sum(chunk.size for chunk in chunks) - prefill, times[-1] - times[0])
    stats.recomputed_tokens += sum(chunk.recomputed for chunk in chunks)


def learn_speed(tier: KvTier, chunks: Rows[Chunk], seconds: float) -> None:
    """Tell the second tier how fast prompts are computed, by a step that did little else; ``seconds``: it ran."""
    total, prefill = sum(chunk.size for chunk in chunks), sum(chunk.size for chunk in chunks if chunk.prefills)
    if 2 * prefill > total:
        tier.computed(prefill, seconds * prefill / total)


def update(stats: EngineStats, chunks: Rows[Chunk], num_open: int, scheduler: Scheduler, cache: KvCache) -> None:
    """Show the state after a step of ``chunks``; ``num_open``: sequences that have not ended."""
    counts = cache.counts
    stats.preemptions, stats.kv_cache_evictions = scheduler.preemptions, counts.evictions
    stats.kv_cache_offloaded_tokens, stats.kv_cache_restored_tokens = counts.offloaded_tokens, counts.restored_tokens
    stats.kv_cache_offloaded_blocks = len(cache.offloaded)
    stats.kv_cache_offload_blocks_limit = cache.offloaded.pages
    chunks = chunks if num_open else []  # what an idle engine shows is not its last step
    stats.set_open(num_open - scheduler.num_waiting, scheduler.num_waiting)
    stats.scheduled = len(chunks)
    stats.drafted_sequences = sum(bool(chunk.drafts) for chunk in chunks)
    prefills = [chunk for chunk in chunks if chunk.prefills]
    stats.context, stats.generation = len(prefills), len(chunks) - len(prefills)
    stats.paused = scheduler.num_paused
    stats.total_context_tokens = sum(chunk.size for chunk in prefills)
    stats.kv_blocks_used, stats.kv_blocks_cached = cache.used_blocks, cache.cached_blocks
    stats.kv_cache_reserved_blocks = cache.reserved_blocks
