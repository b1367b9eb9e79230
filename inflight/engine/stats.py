"""EngineStats: the figures behind an engine's metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """What the engine is doing, and has done since its start: what the metrics show."""

    active: int = 0
    max: int = 0
    scheduled: int = 0
    context: int = 0
    generation: int = 0
    waiting: int = 0
    paused: int = 0
    total_context_tokens: int = 0
    iterations: int = 0
    kv_blocks_max: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_reused: int = 0
    tokens_per_block: int = 0
