"""EngineConfig: what the engine needs to know of a deployment, resolved once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from inflight.deployment import Deployment

_DEFAULT_TOKENS_PER_SEQUENCE = 1024


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the portable engine; the meaning and limits of each are those of ``inflight.deployment``."""

    model: Path
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = None
    block_size: int = 16
    num_blocks: int = 2048
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    prefix_reuse: bool = True
    max_batch_size: int = 32
    max_tokens_per_step: int = 512
    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    max_sequence_length: int | None = None
    """Prompt and output; None: the model's own limit. The cache's capacity limits it too."""

    @classmethod
    def of(cls, deployment: Deployment) -> EngineConfig:
        """Return the engine's part of a deployment."""
        engine, cache, batching = deployment.engine, deployment.kv_cache, deployment.batching
        tokens = cache.tokens or batching.max_batch_size * _DEFAULT_TOKENS_PER_SEQUENCE
        return cls(
            model=deployment.model,
            device=engine.device,
            dtype=engine.dtype,
            threads=engine.threads,
            block_size=cache.block_size,
            num_blocks=-(-tokens // cache.block_size),
            kv_cache_dtype=cache.dtype,
            prefix_reuse=cache.prefix_reuse,
            max_batch_size=batching.max_batch_size,
            max_tokens_per_step=batching.max_tokens_per_step,
            policy=batching.policy,
            max_sequence_length=deployment.limits.max_sequence_length,
        )
