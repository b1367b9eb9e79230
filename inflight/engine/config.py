"""EngineConfig: the portable engine's settings, resolved once from a deployment."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inflight.errors import DeploymentError
from inflight.settings.batching import StepSize
from inflight.settings.guided import GuidedDecodingSettings
from inflight.settings.kv_cache import GPU_MEMORY_FRACTION, TOKENS_PER_SEQUENCE
from inflight.settings.speculation import SpeculationSettings

if TYPE_CHECKING:  # the engine alone does not need the settings' validation
    from inflight.settings.deployment import Deployment

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the portable engine; the meaning and limits of each are those of ``inflight.settings.deployment``."""

    model: Path
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = None
    cpu_step: Literal["auto", "pytorch", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"] = "auto"
    weights: Literal["checkpoint", "int8"] = "checkpoint"
    modeling: Literal["auto", "native", "transformers"] = "auto"
    batch_invariant: bool = False
    block_size: int = 16
    num_blocks: int = 2048
    kv_cache_bytes: int | None = None
    """The cache's size in place of ``num_blocks``."""
    kv_cache_fraction: float | None = None
    """The cache's share of the memory that the weights leave, in place of ``num_blocks``."""
    kv_cache_dtype: Literal["auto", "fp8", "int8", "bfloat16", "float32"] = "auto"
    prefix_reuse: bool = True
    state_snapshots: int | None = None
    """Of the states of recurrent layers; None: the engine chooses, where there are such layers."""
    state_snapshot_tokens: int | None = None
    eviction: Literal["lru", "lfu", "prefix"] = "lru"
    offload_to: Literal["none", "host", "file"] = "none"
    offload_bytes: int = 1 << 30
    offload_directory: Path | None = None
    offload_min_tokens: int | None = None
    max_batch_size: int = 32
    max_tokens_per_step: int = 512
    prefill_chunk_tokens: int | None = None
    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    mode: Literal["inflight", "dynamic", "static"] = "inflight"
    max_queue_delay_ms: float = 10
    fairness: Literal["none", "client"] = "none"
    priority_aging_ns: int | None = 60_000_000_000
    max_sequence_length: int | None = None
    """Prompt and output; None: the model's own limit. The cache's capacity limits it too."""
    automatic: frozenset[str] = frozenset()
    """The sizes that nobody set, by name: of a step on a GPU, lowered if its memory is too small; of a chunk on a CPU,
    lowered if it is too slow."""
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    guided_decoding: GuidedDecodingSettings = field(default_factory=GuidedDecodingSettings)

    @classmethod
    def of(cls, deployment: Deployment, on_gpu: bool = False) -> EngineConfig:
        """Return the engine's part of a deployment; ``on_gpu``: with the sizes for a GPU where none are set.

        Raises:
            DeploymentError: a chunk is larger than the step on this device.
        """
        engine, cache, batching = deployment.engine, deployment.kv_cache, deployment.batching
        size = batching.size(on_gpu)
        chunk = batching.prefill_chunk_tokens
        if chunk is not None and chunk > size.tokens:
            raise DeploymentError(
                f"batching.prefill_chunk_tokens is {chunk}; it must not be above max_tokens_per_step, {size.tokens}"
            )
        fraction = GPU_MEMORY_FRACTION if on_gpu and not cache.sized else cache.memory_fraction
        tokens = cache.tokens or size.sequences * TOKENS_PER_SEQUENCE
        num_blocks = -(-tokens // cache.block_size)
        if cache.tokens is not None and cache.tokens % cache.block_size:
            size_of, whole = cache.block_size, num_blocks * cache.block_size
            log.warning("kv_cache.tokens is %d; it is rounded up to %d, whole blocks of %d", tokens, whole, size_of)
        _log_chosen_sizes(deployment, size, fraction, tokens, on_gpu)
        unset = {"max_batch_size", "max_tokens_per_step"} if on_gpu else {"prefill_chunk_tokens"}
        return cls(
            model=deployment.model, max_sequence_length=deployment.limits.max_sequence_length,
            device=engine.device, dtype=engine.dtype, threads=engine.threads, cpu_step=engine.cpu_step,
            weights=engine.weights, modeling=engine.modeling,
            batch_invariant=engine.batch_invariant,
            block_size=cache.block_size, num_blocks=num_blocks, kv_cache_bytes=cache.bytes, kv_cache_fraction=fraction,
            kv_cache_dtype=cache.dtype, prefix_reuse=cache.prefix_reuse, eviction=cache.eviction,
            state_snapshots=cache.state_snapshots, state_snapshot_tokens=cache.state_snapshot_tokens,
            offload_to=cache.offload.to, offload_bytes=cache.offload.bytes, offload_directory=cache.offload.directory,
            offload_min_tokens=cache.offload.min_tokens,
            max_batch_size=size.sequences, max_tokens_per_step=size.tokens, prefill_chunk_tokens=chunk,
            policy=batching.policy, mode=batching.mode, max_queue_delay_ms=batching.max_queue_delay_ms,
            fairness=batching.fairness, priority_aging_ns=batching.priority_aging_ns,
            speculation=deployment.speculation, guided_decoding=deployment.guided_decoding,
            automatic=frozenset(unset - batching.model_fields_set),
        )  # fmt: skip


def _log_chosen_sizes(
    deployment: Deployment, size: StepSize, fraction: float | None, tokens: int, on_gpu: bool
) -> None:
    """Log the sizes that the deployment does not set, and why they were chosen."""
    sizes = {"max_batch_size": size.sequences, "max_tokens_per_step": size.tokens}
    given = deployment.batching.model_fields_set
    chosen = [f"batching.{name} is {value}" for name, value in sizes.items() if name not in given]
    if not deployment.kv_cache.sized:
        chosen.append(f"kv_cache.memory_fraction is {fraction}" if on_gpu else f"kv_cache.tokens is {tokens}")
    if chosen:
        why = "a GPU, which computes more at once and whose memory is the engine's" if on_gpu else "a CPU"
        log.info("%s: the deployment does not say, and the engine runs on %s", ", ".join(chosen), why)
