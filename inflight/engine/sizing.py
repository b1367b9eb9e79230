"""How a device's memory is divided at the start: what the largest step takes, and what the KV cache gets.

The largest step is computed once before anything is served, so that its memory is measured and known to suffice. On a
CPU, whose steps take longer with each token, a small one is timed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from inflight.engine.checkpoint import LoadedModel, load_config, outline_model, resolve_dtype
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.device import DeviceMemory, free_memory
from inflight.engine.kvcache.blocks import Blocks, BlockTable, SequenceState
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.kvcache.offload_pool import HostMemory, MappedFile, OffloadPool, RestoreRule
from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.models.config import STATE_CHUNK
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.request import Request
from inflight.engine.sequence import Sequence
from inflight.errors import DeploymentError
from inflight.sampling import MAX_TOP_LOG_PROBS, SamplingParams
from inflight.settings.batching import ON_CPU, SMALLEST_CHUNK, StepSize, affordable_chunk

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8
_LARGEST_SHARE = 0.15
"""The largest step may take this share of the memory that weights leave, if the engine chooses its size."""
_SNAPSHOTS_SHARE = 4
"""Snapshots of states take at most one part in so many of the cache's memory, if the engine chooses their number."""
_TIMED_TOKENS = 64
"""Tokens of a prompt that are timed: enough to be computed as those of a chunk are."""
_GRAPHS_BYTES = 768 << 20
"""The most bytes that CUDA graphs and libraries take on a GPU after the KV cache is allocated."""


def everything(max_tokens: int, context_logits: bool) -> SamplingParams:
    """Return the sampling parameters that take the most memory; one sequence at a time has context logits."""
    return SamplingParams(
        max_tokens,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        log_probs=True,
        top_log_probs=1,
        log_prob_ids=(0,),
        prompt_log_probs=MAX_TOP_LOG_PROBS if context_logits else None,
        context_logits=context_logits,
        generation_logits=True,
    )


def warm_up_requests(config: EngineConfig, on_gpu: bool, vocab_size: int, max_length: int) -> list[Request]:
    """Return the requests of the warm-up: a short prompt or, on a GPU, the largest steps that there can be.

    On a GPU, libraries choose kernels by size, and memory is allocated once: it must be allocated before requests come.
    """
    longest = config.max_tokens_per_step if on_gpu else _WARM_UP_TOKENS
    prompt = [token % vocab_size for token in range(min(longest, max_length - 1))]
    batch = config.max_batch_size if on_gpu else 0
    sampled = [Request([0], everything(_WARM_UP_TOKENS, index == 0)) for index in range(batch)]
    return [Request(prompt, SamplingParams(max_tokens=_WARM_UP_TOKENS)), *sampled]


def size_step(
    config: EngineConfig, memory: DeviceMemory, compute: Callable[[StepSize], object]
) -> tuple[EngineConfig, int]:
    """Measure the largest step, and lower automatically chosen sizes until it takes a small share of the memory.

    ``memory`` is the device's, with the weights in it; ``compute`` computes a step of a given size.

    Returns:
        The settings, with the sizes settled, and the bytes that such a step takes beside weights and KV cache.

    Raises:
        DeploymentError: there is no memory for a step of the sizes that the deployment asks for, or of the smallest.
    """
    free, wanted = memory.free(), StepSize(config.max_batch_size, config.max_tokens_per_step)
    size = wanted
    while True:
        peak = None
        with suppress(torch.OutOfMemoryError):
            peak = memory.peak_of(partial(compute, size))
        smaller = _smaller(config, size)
        if (peak is not None and peak <= _LARGEST_SHARE * free) or smaller == size:
            break
        size = smaller
    if peak is None:
        raise DeploymentError(
            f"not enough memory for a step of {size.tokens} tokens and {size.sequences} sequences: weights leave "
            f"{free} bytes; smaller `batching.max_tokens_per_step` and `batching.max_batch_size` take less"
        )
    if size != wanted:
        log.warning(
            "batching.max_batch_size is %d, not %d, and max_tokens_per_step %d, not %d: a larger step would take more "
            "than %.0f %% of the %.1f GiB that weights leave",
            size.sequences, wanted.sequences, size.tokens, wanted.tokens, 100 * _LARGEST_SHARE, free / 2**30,
        )  # fmt: skip
    log.info("the largest step takes %.1f MiB of the %.1f GiB that weights leave", peak / 2**20, free / 2**30)
    sized = replace(config, max_batch_size=size.sequences, max_tokens_per_step=size.tokens, automatic=frozenset())
    return sized, peak


def _smaller(config: EngineConfig, size: StepSize) -> StepSize:
    """Return half of each size that was chosen automatically, but no less than a CPU's default."""
    return StepSize(*(
        max(least, one // 2) if name in config.automatic else one
        for name, one, least in zip(("max_batch_size", "max_tokens_per_step"), size, ON_CPU, strict=True)
    ))  # fmt: skip


def choose_chunk(config: EngineConfig, compute: Callable[[int], int], recurrent: bool = False) -> EngineConfig:
    """Return the settings with the prefill chunk that suits a CPU's speed, as a short prompt shows it.

    ``compute`` computes about so many tokens of a prompt, and returns how many they were. ``recurrent``: whether there
    are layers that take ``STATE_CHUNK`` tokens at once.
    """
    smallest = STATE_CHUNK if recurrent else SMALLEST_CHUNK
    log.info("timing a prompt of %d tokens, which may take some seconds", _TIMED_TOKENS)
    compute(_TIMED_TOKENS)  # memory is allocated once
    started = time.perf_counter()
    tokens = compute(_TIMED_TOKENS)
    seconds = (time.perf_counter() - started) / tokens
    chunk = affordable_chunk(seconds, config.max_tokens_per_step, smallest)
    log.info(
        "batching.prefill_chunk_tokens is %d: the deployment does not say, and a token of a prompt takes %.2f ms here; "
        "those that decode wait for up to %.1f s of it",
        chunk, 1000 * seconds, chunk * seconds,
    )  # fmt: skip
    return replace(config, prefill_chunk_tokens=chunk, automatic=frozenset())


def full_step(
    size: StepSize, longest: int, block_size: int, blocks: int, context_rows: int, drafts: int = 0
) -> list[Chunk]:
    """Return the largest step: as many prompts as possible, each of which samples a token with all its outputs.

    With speculation each also has as many drafts as possible, since each draft takes a row of logits as a token does.

    Args:
        size, block_size: of the step, and of a block of the KV cache.
        longest: tokens that a sequence may have.
        blocks: all sequences share this many blocks, and one recurrent state, and overwrite each other's, as the
            result is not used.
        context_rows: tokens whose context logits are on the device at a time; the first prompt has so many.
        drafts: the most drafts of a sequence.
    """
    count = min(size.sequences, size.tokens)
    drafts = min(drafts, size.tokens // count - 1, longest - 1)
    room, chunks = size.tokens - count * (1 + drafts), list[Chunk]()
    for index in range(count):
        more = min(room, max(0, (longest if index else min(longest, context_rows)) - 1 - drafts))
        room -= more
        request = Request([0] * (1 + more), everything(1, context_logits=index == 0))
        sequence = Sequence(request, index, index, longest + 1, None)
        tokens = 1 + more + drafts
        own = Blocks(index % blocks for index in range(-(-tokens // block_size)))
        sequence.admit(BlockTable(own, 0, 0, state=SequenceState(0, len(request.prompt), ())))
        chunks.append(Chunk(sequence, 0, tokens, (0,) * drafts, tuple(range(-1, drafts - 1))))
    return chunks


class CacheMemory(NamedTuple):
    """What a model runner keeps of sequences."""

    kv_pool: KvPool
    state_pool: StatePool
    offload_pool: OffloadPool | None
    config: EngineConfig
    """The settings, with the numbers of blocks and snapshots that were chosen."""


def allocate_cache_memory(
    config: EngineConfig, loaded: LoadedModel, served_length: int, step_bytes: int
) -> CacheMemory:
    """Allocate the KV cache's memory, that of recurrent states, and the offload pool, and log the arithmetic.

    The model's weights are in memory; ``step_bytes`` are those that the largest step takes.

    Raises:
        DeploymentError: there is not enough memory, or an offload pool cannot be made.
    """
    block, state = loaded.make_kv_pool(1, config.block_size), loaded.make_state_pool(1)
    num_blocks, snapshots = _divide(config, block, state.nbytes, step_bytes)
    slots = config.max_batch_size + snapshots if state.layers else 0
    try:
        kv_pool, state_pool = loaded.make_kv_pool(num_blocks, config.block_size), loaded.make_state_pool(slots)
    except RuntimeError as error:  # of memory, whatever the device
        reason = str(error).splitlines()[0]
        states = f" and {slots} recurrent states of {state.nbytes}" if slots else ""
        raise DeploymentError(
            f"kv_cache: no memory for {num_blocks} blocks of {block.nbytes} bytes{states}: {reason}"
        ) from None
    offload_pool = _make_offload_pool(config, kv_pool, num_blocks) if config.offload_to != "none" else None
    log.info(_arithmetic(config, block, num_blocks, served_length))
    if slots:
        log.info(
            "recurrent state: %d layers x %d bytes = %d bytes per sequence, as much as keys and values of %d tokens; "
            "%d sequences at once and %d snapshots: %.1f MiB",
            len(state.layers), state.nbytes // len(state.layers), state.nbytes,
            state.nbytes * config.block_size // block.nbytes, config.max_batch_size, snapshots,
            state_pool.nbytes / 2**20,
        )  # fmt: skip
    if offload_pool is not None:
        log.info(
            "KV cache, second tier in %s: %d blocks, %d tokens, %.1f MiB",
            "the host's memory" if config.offload_to == "host" else "a mapped file",
            offload_pool.capacity, offload_pool.capacity * config.block_size,
            offload_pool.capacity * block.nbytes / 2**20,
        )  # fmt: skip
    chosen = replace(config, num_blocks=num_blocks, state_snapshots=snapshots if slots else None)
    return CacheMemory(kv_pool, state_pool, offload_pool, chosen)


def reserved_bytes(config: EngineConfig, loaded: LoadedModel, free: int) -> int:
    """Return how many of the ``free`` bytes to keep for the KV cache and a draft model when weights are decoded.

    Where the settings ask for a share, a quarter of what the draft model leaves is kept.
    """
    block = loaded.make_kv_pool(1, config.block_size)
    weights, drafts_block = _draft_model_bytes(config, block.device)
    if config.kv_cache_fraction is not None:
        return weights + max(0, free - weights) // 4
    if config.kv_cache_bytes is not None:
        return weights + config.kv_cache_bytes // block.nbytes * (block.nbytes + drafts_block)
    states = loaded.make_state_pool(1).nbytes * (config.max_batch_size + _wanted_snapshots(config))
    return weights + config.num_blocks * (block.nbytes + drafts_block) + states


def _wanted_snapshots(config: EngineConfig) -> int:
    """Return how many snapshots of states there are where memory sets no limit."""
    if not config.prefix_reuse:
        return 0
    return config.max_batch_size if config.state_snapshots is None else config.state_snapshots


def _divide(config: EngineConfig, block: KvPool, state_bytes: int, step_bytes: int) -> tuple[int, int]:
    """Return how many blocks like ``block`` there are, and how many snapshots, each of ``state_bytes``.

    ``step_bytes``: what the largest step takes. Every sequence that runs has a state; ``state_bytes`` may be 0.
    """
    block_bytes, snapshots = block.nbytes, _wanted_snapshots(config) if state_bytes else 0
    if config.kv_cache_bytes is not None:
        name, budget = "bytes", config.kv_cache_bytes
    elif config.kv_cache_fraction is not None:
        weights, drafts_block = _draft_model_bytes(config, block.device)
        if drafts_block:
            log.info(
                "the draft model, beside the KV cache: weights of %.1f MiB, and %d bytes for each block of the cache",
                weights / 2**20, drafts_block,
            )  # fmt: skip
        rest = free_memory(block.device) - weights - step_bytes
        # What graphs and libraries take is known only later; a share of a small card's rest would be too little.
        graphs = _GRAPHS_BYTES if step_bytes else 0
        name, budget = "memory_fraction", max(0, min(int(config.kv_cache_fraction * rest), rest - graphs))
        block_bytes += drafts_block
    else:
        return config.num_blocks, snapshots
    rest = budget - config.max_batch_size * state_bytes
    if config.state_snapshots is None and state_bytes:
        snapshots = max(0, min(snapshots, rest // _SNAPSHOTS_SHARE // state_bytes))
    rest -= snapshots * state_bytes
    if rest < 2 * block_bytes:
        states = f", {config.max_batch_size} states of sequences and {snapshots} snapshots {state_bytes} each"
        raise DeploymentError(
            f"kv_cache.{name} gives {budget} bytes; a block of {config.block_size} tokens takes {block_bytes}"
            f"{states if state_bytes else ''}, and there must be two blocks"
        )
    return rest // block_bytes, snapshots


def _draft_model_bytes(config: EngineConfig, device: torch.device) -> tuple[int, int]:
    """Return what the draft model's weights will take, and each block of its cache, which has as many; 0: none."""
    directory = config.speculation.draft_model
    if config.speculation.method != "draft_target" or directory is None:
        return 0, 0
    model = load_config(directory, config.modeling)
    dtype = resolve_dtype(config.dtype, model, device)
    outline = outline_model(directory, model, dtype, device, model.max_position_embeddings, "auto")
    weights, block_bytes = outline.nbytes, outline.make_kv_pool(1, config.block_size).nbytes
    if isinstance(outline.model, DecoderModel) and model.tie_word_embeddings and device.type == "cuda":
        weights -= outline.model.lm_head.weight.nbytes  # on a CPU it is packed, and so a copy
    return weights, block_bytes


def _make_offload_pool(config: EngineConfig, kv_pool: KvPool, num_blocks: int) -> OffloadPool:
    block_bytes = kv_pool.nbytes // num_blocks
    blocks = config.offload_bytes // block_bytes
    if not blocks:
        raise DeploymentError(f"kv_cache.offload.bytes is {config.offload_bytes}; one block takes {block_bytes}")
    storage: HostMemory | MappedFile
    if config.offload_to == "host":
        free = free_memory(torch.device("cpu"))
        if config.offload_bytes > free:
            raise DeploymentError(f"kv_cache.offload.bytes is {config.offload_bytes}; the host has {free} free")
        storage = HostMemory(blocks, block_bytes)
    else:
        storage = MappedFile(config.offload_directory, blocks, block_bytes)
    return OffloadPool(kv_pool, num_blocks, storage, RestoreRule(config.offload_min_tokens))


def _arithmetic(config: EngineConfig, block: KvPool, num_blocks: int, served_length: int) -> str:
    block_size = config.block_size
    own = {id(layer): layer for layer in block.layers.values()}.values()  # some layers share those of another
    shapes = Counter((2 - layer.is_latent, len(layer.keys), layer.keys.shape[-1]) for layer in own)
    per_token = block.nbytes // block_size
    plain = sum(parts * count * heads * dim for (parts, heads, dim), count in shapes.items()) * block.stored.itemsize
    heads_of_all = sum(parts * count * heads for (parts, heads, _), count in shapes.items())
    scales = (per_token - plain) // heads_of_all
    behind = f" + {scales})" if scales else ")"
    terms = " + ".join(
        f"{parts} x {count} layers x {heads} heads x ({dim} x {block.stored.itemsize}{behind}"
        for (parts, heads, dim), count in shapes.items()
    )
    tokens = num_blocks * block_size
    longest = min(served_length, tokens)
    fit = num_blocks // -(-longest // block_size)
    return (
        f"KV cache in {str(block.stored).removeprefix('torch.')}: {terms} bytes = {per_token} bytes per token; "
        f"{num_blocks} blocks of {block_size} tokens: "
        f"{tokens} tokens, {num_blocks * block.nbytes / 2**20:.1f} MiB; of the longest sequences, {longest} tokens, "
        f"{fit} fit at once"
    )
