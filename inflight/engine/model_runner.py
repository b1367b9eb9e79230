"""The model runner: owns weights and KV tensors, and turns a step's chunks into logits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.paged import KvTensors, PagedAttention, Span
from inflight.engine.checkpoint import LoadedModel, load_config, load_model, resolve_dtype
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.cuda.choice import cuda_forward, prepare_weights
from inflight.engine.cuda.invariance import require_invariance
from inflight.engine.device_memory import DeviceMemory, device_memory
from inflight.engine.full_step import full_step, size_step
from inflight.engine.kv.memory import allocate_kv_memory, reserved_bytes
from inflight.engine.kv_cache import BlockCopy, BlockTable
from inflight.engine.models.packed import pack_linears, pad_rows
from inflight.engine.quant.convert import join_int8_parts
from inflight.engine.sampler import sample
from inflight.engine.shards import Shards
from inflight.engine.speculate.tree import ancestry
from inflight.engine.speculate.verification import rows
from inflight.engine.stats import process_memory
from inflight.engine.transfer import TokenIds, to_device
from inflight.errors import DeploymentError
from inflight.sizes import StepSize

if TYPE_CHECKING:  # it needs Triton's compiler
    from inflight.engine.cuda.forward import CudaForward

log = logging.getLogger(__name__)

_CONTEXT_ROWS = 256
"""Tokens whose context logits are on the device at a time: of a whole prompt they may take more than its KV cache."""


class ModelRunner:
    """Runs the model on one device."""

    def __init__(self, config: EngineConfig, open_shards: Callable[[Path], Shards] = Shards) -> None:
        """
        Args:
            config: the engine's settings.
            open_shards: returns what holds a checkpoint's weights.

        Raises:
            DeploymentError: the checkpoint or the device cannot be used.
        """
        self.device = resolve_device(config.device)
        if config.batch_invariant and self.device.type == "cuda":
            require_invariance(self.device, config.speculation.candidates)
        # One core is left to the server and the other stages: a thread that waits for a busy core stalls every step.
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
        model = load_config(config.model)
        dtype = resolve_dtype(config.dtype, model, self.device)
        self.max_length = config.max_sequence_length or model.max_position_embeddings
        if config.kv_cache_bytes is None and config.kv_cache_fraction is None:
            self.max_length = min(self.max_length, config.num_blocks * config.block_size)
        self.vocab_size = model.vocab_size
        self._block_size, self._one_tile = config.block_size, config.batch_invariant
        self._kernels: CudaForward | None = None
        started = time.perf_counter()
        loaded = load_model(
            config.model, model, dtype, self.device, self.max_length, config.kv_cache_dtype, open_shards=open_shards
        )
        self._model = loaded.model
        prepare_weights(self._model, self.device, partial(reserved_bytes, config, loaded), config.batch_invariant)
        nbytes = loaded.nbytes
        join_int8_parts(self._model)
        pack_linears(self._model)
        weights_loaded = time.perf_counter()
        memory, self.tier = device_memory(self.device), None
        step_bytes = 0
        if memory is not None and (config.automatic or config.kv_cache_fraction is not None):
            config, step_bytes = self._size_step(config, loaded, memory)
        held = allocate_kv_memory(config, loaded, self.max_length, step_bytes)
        self.tier = held.tier
        self.config = replace(config, num_blocks=held.num_blocks)
        """The settings, with what was decided here."""
        self.max_length = min(self.max_length, held.num_blocks * config.block_size)
        self._use(held.tensors, config.max_batch_size)
        self.start_phases = {"weights": weights_loaded - started, "kv_cache": time.perf_counter() - weights_loaded}
        """Seconds by phase."""
        log.info(
            "%s on %s in %s: %d layers, quantization %s, weights of %.1f MiB, sequences up to %d tokens",
            model.architecture, self.device, dtype, model.num_layers, loaded.scheme, nbytes / 2**20, self.max_length,
        )  # fmt: skip

    def _use(self, tensors: KvTensors, max_batch_size: int) -> None:
        """Keep keys and values there from now on, of at most so many sequences."""
        self._kv, sizes = tensors, (self._block_size, max_batch_size, self.max_length, self._one_tile)
        if self._kernels is None:
            self._kernels = cuda_forward(self._model, tensors, *sizes)
        else:
            self._kernels = self._kernels.with_cache(tensors, *sizes)

    def _size_step(self, config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory) -> tuple[EngineConfig, int]:
        """Return the settings with the sizes of a step settled, and the bytes that the largest step takes.

        It is computed before the cache takes the rest of the memory, with one of a single block, which is all that
        kernels need to compute what nobody reads; without kernels, with one just large enough.
        """
        longest, blocks = min(self.max_length, config.max_tokens_per_step), 1
        self._use(loaded.make_kv_tensors(blocks, self._block_size), config.max_batch_size)
        if self._kernels is None:
            blocks = -(-longest // self._block_size)
            self._kv = loaded.make_kv_tensors(blocks, self._block_size)

        def compute(size: StepSize) -> None:
            drafts = config.speculation.most_drafts
            chunks = full_step(size, longest, self._block_size, blocks, _CONTEXT_ROWS, drafts)
            sample(self.run(chunks, ())[0], rows(chunks))

        sized = size_step(config, memory, compute)
        del self._kv
        return sized.config, sized.peak

    @property
    def overlaps(self) -> bool:
        """Whether the host can go on while a step is computed."""
        return self.device.type == "cuda"

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process has in memory, reserved on the device, and pinned for the cache."""
        on_gpu = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return process_memory() | {"gpu": on_gpu, "pinned": self.tier.pinned_bytes if self.tier else 0}

    @torch.inference_mode()
    def run(
        self, chunks: Sequence[Chunk], copies: Sequence[BlockCopy], chosen: Tensor | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute a step.

        Args:
            chunks: what to compute; the sequences' tables have room for it.
            copies: blocks to copy before.
            chosen: on the device, the tokens ``[n]`` of the ``n`` chunks that await theirs, in their order.

        Returns:
            Float32 logits ``[n, vocab]`` of the last token of each chunk that samples and of its drafts, in their
            order; and by index of chunk the logits ``[size, vocab]`` of all its tokens, where its request wants
            context logits; those are on the host.
        """
        (self.tier or self._kv).copy(copies)
        spans = self._spans(chunks)
        places = [span.first for chunk, span in zip(chunks, spans, strict=True) if chunk.awaits]
        hidden = self._forward(TokenIds([token for chunk in chunks for token in chunk.tokens], chosen, places), spans)
        last = [
            row
            for chunk, span in zip(chunks, spans, strict=True)
            if chunk.samples
            for row in range(span.first + span.count - 1 - len(chunk.drafts), span.first + span.count)
        ]
        context = {
            index: self._context_logits(hidden[span.first : span.first + span.count])
            for index, (chunk, span) in enumerate(zip(chunks, spans, strict=True))
            if _wants_context_logits(chunk)
        }
        if len(last) < len(hidden):
            hidden = hidden[to_device(np.array(last, np.int64), self.device)]
        return self._logits(hidden), context

    def warm_up(self) -> None:
        """Prepare for steps: on a GPU, capture those that only decode."""
        started = time.perf_counter()
        if self._kernels is not None:
            self._kernels.capture()
            self.start_phases["graphs"] = time.perf_counter() - started

    def _forward(self, token_ids: TokenIds, spans: list[Span]) -> Tensor:
        """Return hidden states ``[tokens, hidden]``."""
        if self._kernels is not None and not any(span.paths for span in spans):  # the kernels know no trees
            return self._kernels(token_ids, spans)
        attend = PagedAttention(self._kv, spans, self._block_size)
        tokens = token_ids.on(self.device)
        return self._model(pad_rows(tokens), pad_rows(attend.positions), attend)[: len(tokens)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]`` of ``hidden [tokens, hidden]``."""
        if self._kernels is not None:
            return self._model.logits(hidden)
        return self._model.logits(pad_rows(hidden))[: len(hidden)]

    def _context_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]`` of ``hidden [tokens, hidden]``, on the host."""
        if self.device.type == "cpu":
            return self._logits(hidden)
        return torch.cat([self._logits(part).cpu() for part in hidden.split(_CONTEXT_ROWS)])

    def move(self, table: BlockTable, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy keys and values of a sequence: ``pairs`` of from which token's place to which; all are read first."""
        size = self._block_size
        sources, targets = (
            [table.blocks[place // size] * size + place % size for place in places]
            for places in zip(*pairs, strict=True)
        )
        self._kv.move(sources, targets)

    def _spans(self, chunks: Sequence[Chunk]) -> list[Span]:
        spans, first = [], 0
        for chunk in chunks:
            table = chunk.sequence.table
            assert table is not None
            spans.append(Span(first, chunk.start, chunk.size, table.blocks, _paths(chunk)))
            first += chunk.size
        return spans


def _wants_context_logits(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    return sequence.request.sampling.context_logits and not sequence.generated and not chunk.awaits


def _paths(chunk: Chunk) -> list[list[int]]:
    """Return the paths of a chunk's tree of drafts; none where each draft follows the one before."""
    chain = all(parent == index - 1 for index, parent in enumerate(chunk.parents))
    return [] if chain else [ancestry(chunk.parents, node) for node in range(len(chunk.parents))]


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``; auto: a GPU if there is one.

    Raises:
        DeploymentError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeploymentError(f"engine.device is {name!r}; it must be cpu, cuda, cuda:N or auto") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeploymentError(f"engine.device is {name!r}, and PyTorch finds no CUDA device")
    if device.type not in ("cpu", "cuda"):
        raise DeploymentError(f"engine.device is {name!r}; it must be cpu, cuda, cuda:N or auto")
    return device
