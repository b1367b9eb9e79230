"""The largest step: made up to be computed before anything is served, so that what it takes is known, and was had."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.device_memory import DeviceMemory
from inflight.engine.kv.blocks import Blocks, BlockTable
from inflight.engine.request import Request
from inflight.engine.sequence import Sequence
from inflight.errors import DeploymentError
from inflight.sampling import SamplingParams
from inflight.sizes import ON_CPU, StepSize

log = logging.getLogger(__name__)

_LARGEST_SHARE = 0.15
"""Of the memory that weights leave, for the largest step, where its size is the engine's to choose."""


def everything(max_tokens: int, context_logits: bool) -> SamplingParams:
    """Return what takes memory for each token of the vocabulary, at once; context logits one sequence at a time has."""
    return SamplingParams(
        max_tokens,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        log_probs=True,
        top_log_probs=1,
        context_logits=context_logits,
        generation_logits=True,
    )


@dataclass(frozen=True)
class SizedStep:
    """The settings, with the sizes of a step that were settled, and what such a step takes."""

    config: EngineConfig
    peak: int
    """Bytes beside weights and KV cache."""


def size_step(config: EngineConfig, memory: DeviceMemory, compute: Callable[[StepSize], object]) -> SizedStep:
    """Measure the largest step, and lower the sizes that were chosen automatically until it takes a small share.

    Args:
        config: the settings.
        memory: the device's; the weights are in it.
        compute: computes a step of such a size.

    Raises:
        DeploymentError: there is no memory for a step of the sizes that the deployment asks for, or of the smallest.
    """
    free, wanted = memory.free(), StepSize(config.max_batch_size, config.max_tokens_per_step)
    size = wanted
    while True:
        peak = _peak(memory, compute, size)
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
    return SizedStep(sized, peak)


def _peak(memory: DeviceMemory, compute: Callable[[StepSize], object], size: StepSize) -> int | None:
    """Return what a step takes; None: more than there is."""
    try:
        return memory.peak_of(lambda: compute(size))
    except torch.OutOfMemoryError:
        return None


def _smaller(config: EngineConfig, size: StepSize) -> StepSize:
    """Return half the size, of what was chosen automatically; a CPU's is enough for any device."""
    return StepSize(*(
        max(least, one // 2) if name in config.automatic else one
        for name, one, least in zip(("max_batch_size", "max_tokens_per_step"), size, ON_CPU, strict=True)
    ))  # fmt: skip


def full_step(
    size: StepSize, longest: int, block_size: int, blocks: int, context_rows: int, drafts: int = 0
) -> list[Chunk]:
    """Return the largest step: prompts, as many as may be, each of which gets a token and whatever else can be asked.

    With speculation each has as many drafts as may be too: each draft takes a row of logits, as a token does.

    Args:
        size: of the step.
        longest: tokens that a sequence may have.
        block_size: tokens per block of the KV cache.
        blocks: of which all sequences have the first ones, again and again: what they hold is of no use.
        context_rows: tokens whose context logits are on the device at a time; the first prompt has so many.
        drafts: of each sequence, at most.
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
        sequence.table = BlockTable(Blocks(index % blocks for index in range(-(-tokens // block_size))), 0, 0)
        chunks.append(Chunk(sequence, 0, tokens, (0,) * drafts, tuple(range(-1, drafts - 1))))
    return chunks
