"""The KV cache's memory at the start: how many blocks there are, of how many bytes, and what fits in them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inflight.engine.attention.paged import KvTensors
from inflight.engine.checkpoint import LoadedModel, load_config, outline_model, resolve_dtype
from inflight.engine.config import EngineConfig
from inflight.engine.device_memory import free_memory
from inflight.engine.kv.offload import RestoreRule
from inflight.engine.kv.tier import FilePages, HostPages, KvTier
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_GRAPHS_BYTES = 256 << 20
"""What CUDA graphs and libraries take on a GPU once the KV cache is there, at the most."""


@dataclass(frozen=True)
class KvMemory:
    """What holds keys and values."""

    tensors: KvTensors
    num_blocks: int
    tier: KvTier | None
    """None: what the cache has no room for is forgotten."""


def allocate_kv_memory(config: EngineConfig, loaded: LoadedModel, served_length: int, step_bytes: int = 0) -> KvMemory:
    """Allocate it, and log the arithmetic.

    Args:
        config: the engine's settings.
        loaded: the model; its weights are in memory.
        served_length: the longest sequence that the model and the settings allow.
        step_bytes: what the largest step takes beside it.

    Raises:
        DeploymentError: there is not enough memory, or a second tier cannot be made.
    """
    one = loaded.make_kv_tensors(1, config.block_size)
    num_blocks = _num_blocks(config, one, step_bytes)
    try:
        tensors = loaded.make_kv_tensors(num_blocks, config.block_size)
    except RuntimeError as error:  # of memory, whatever the device
        reason = str(error).splitlines()[0]
        raise DeploymentError(f"kv_cache: no memory for {num_blocks} blocks of {one.nbytes} bytes: {reason}") from None
    tier = _make_tier(config, tensors, num_blocks) if config.offload_to != "none" else None
    log.info(_arithmetic(config, one, num_blocks, served_length))
    if tier is not None:
        log.info(
            "KV cache, second tier in %s: %d blocks, %d tokens, %.1f MiB",
            "the host's memory" if config.offload_to == "host" else "a mapped file",
            tier.pages, tier.pages * config.block_size, tier.nbytes / 2**20,
        )  # fmt: skip
    return KvMemory(tensors, num_blocks, tier)


def reserved_bytes(config: EngineConfig, loaded: LoadedModel, free: int) -> int:
    """Return how many of ``free`` bytes, which the weights leave, the KV cache and a draft model are to get.

    Where the KV cache gets a share, that is a quarter of what the draft model leaves, at the least.
    """
    one = loaded.make_kv_tensors(1, config.block_size)
    weights, drafts_block = _draft_model_bytes(config, one.keys.device)
    if config.kv_cache_fraction is not None:
        return weights + max(0, free - weights) // 4
    num_blocks = config.num_blocks if config.kv_cache_bytes is None else config.kv_cache_bytes // one.nbytes
    return weights + num_blocks * (one.nbytes + drafts_block)


def _num_blocks(config: EngineConfig, one: KvTensors, step_bytes: int) -> int:
    """Return how many blocks as ``one`` there are, beside steps that take ``step_bytes``."""
    block_bytes = one.nbytes
    if config.kv_cache_bytes is not None:
        name, budget = "bytes", config.kv_cache_bytes
    elif config.kv_cache_fraction is not None:
        weights, drafts_block = _draft_model_bytes(config, one.keys.device)
        if drafts_block:
            log.info(
                "the draft model, beside the KV cache: weights of %.1f MiB, and %d bytes for each block of the cache",
                weights / 2**20, drafts_block,
            )  # fmt: skip
        rest = free_memory(one.keys.device) - weights - step_bytes
        # What graphs and libraries take is known only later; a share of a small card's rest would be too little.
        graphs = _GRAPHS_BYTES if step_bytes else 0
        name, budget = "memory_fraction", max(0, min(int(config.kv_cache_fraction * rest), rest - graphs))
        block_bytes += drafts_block
    else:
        return config.num_blocks
    if budget < 2 * block_bytes:
        raise DeploymentError(
            f"kv_cache.{name} gives {budget} bytes; a block of {config.block_size} tokens takes {block_bytes}, "
            "and there must be two"
        )
    return budget // block_bytes


def _draft_model_bytes(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Return what the draft model's weights will take, and each block of its cache, which has as many; 0: none."""
    directory = config.speculation.draft_model
    if config.speculation.method != "draft_target" or directory is None:
        return 0, 0
    model = load_config(directory)
    dtype = resolve_dtype(config.dtype, model, device)
    outline = outline_model(directory, model, dtype, device, model.max_position_embeddings, "auto")
    weights, block_bytes = outline.nbytes, outline.make_kv_tensors(1, config.block_size).nbytes
    if model.tie_word_embeddings and device.type == "cuda":  # on a CPU it is packed, and so a copy
        weights -= outline.model.lm_head.weight.nbytes
    return weights, block_bytes


def _make_tier(config: EngineConfig, tensors: KvTensors, num_blocks: int) -> KvTier:
    def make_pages(page_bytes: int) -> HostPages | FilePages:
        pages = config.offload_bytes // page_bytes
        if not pages:
            raise DeploymentError(f"kv_cache.offload.bytes is {config.offload_bytes}; one block takes {page_bytes}")
        if config.offload_to == "host":
            free = free_memory(torch.device("cpu"))
            if config.offload_bytes > free:
                raise DeploymentError(f"kv_cache.offload.bytes is {config.offload_bytes}; the host has {free} free")
            return HostPages(pages, page_bytes)
        return FilePages(config.offload_directory, pages, page_bytes)

    return KvTier(tensors, num_blocks, make_pages, RestoreRule(config.offload_min_tokens))


def _arithmetic(config: EngineConfig, one: KvTensors, num_blocks: int, served_length: int) -> str:
    layers, heads, block_size, dim = one.keys.shape
    scales = (one.nbytes - one.keys.nbytes - one.values.nbytes) // (2 * layers * heads * block_size)
    item = f"{dim} x {one.keys.itemsize}" + (f" + {scales}" if scales else "")
    tokens = num_blocks * block_size
    longest = min(served_length, tokens)
    fit = num_blocks // -(-longest // block_size)
    return (
        f"KV cache in {str(one.keys.dtype).removeprefix('torch.')}: 2 x {layers} layers x {heads} heads x ({item}) "
        f"bytes = {one.nbytes // block_size} bytes per token; {num_blocks} blocks of {block_size} tokens: "
        f"{tokens} tokens, {num_blocks * one.nbytes / 2**20:.1f} MiB; of the longest sequences, {longest} tokens, "
        f"{fit} fit at once"
    )
