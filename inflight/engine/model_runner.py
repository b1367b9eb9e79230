"""The model runner owns the weights and the KV cache's memory, and turns a step's chunks into logits."""

from __future__ import annotations

import logging
import time
from collections import abc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.attention.torch_recurrence import StateRange, TorchRecurrence
from inflight.engine.checkpoint import (
    LoadedModel,
    Weights,
    load_config,
    load_model,
    open_weights,
    outline_model,
    resolve_dtype,
)
from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.cuda.prepare import cuda_forward, prepare_weights, require_invariance
from inflight.engine.device import DeviceMemory, device_memory, resolve_device
from inflight.engine.kvcache.blocks import BlockCopy, BlockTable, StateCopy
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.kvcache.state_pool import StatePool
from inflight.engine.models.adapted.check import check
from inflight.engine.models.adapted.model import AdaptedModel
from inflight.engine.models.limits import longest_sequence
from inflight.engine.models.packed import pack_linears, pad_rows
from inflight.engine.native.bindings import NativeError
from inflight.engine.native.prepare import native_model
from inflight.engine.prompt_outputs import CONTEXT_ROWS, PromptPart, StepStates, prompt_part
from inflight.engine.quant.convert import join_int8_parts
from inflight.engine.quant.decoding import decode_once
from inflight.engine.recurrent import check_recurrent
from inflight.engine.sampler import PendingSample, sample_async
from inflight.engine.sequence import SamplingRow
from inflight.engine.sizing import allocate_cache_memory, choose_chunk, full_step, reserved_bytes, size_step
from inflight.engine.speculate.verification import ancestry, sampling_rows
from inflight.engine.stats import process_memory
from inflight.engine.transfer import TokenIds, to_device
from inflight.errors import DeploymentError
from inflight.settings.batching import StepSize
from inflight.settings.threads import cpu_threads

if TYPE_CHECKING:  # it needs Triton's compiler
    from inflight.engine.cuda.forward import CudaForward

log = logging.getLogger(__name__)


def _log_threads(given: int | None, threads: int, native: bool) -> None:
    """Log how many threads compute on a CPU, and why."""
    if given is not None:
        why = "the deployment says so"
    elif native:
        why = "the deployment does not say; the kernels share a step by small tasks, beside a server that takes little"
    else:
        why = "the deployment does not say; PyTorch waits for its slowest thread, so that the server needs a core"
    log.info("engine.threads is %d: %s", threads, why)


class ModelRunner:
    """Runs the model on one device."""

    def __init__(self, config: EngineConfig, open_shards: Callable[[Path], Weights] = open_weights) -> None:
        """``open_shards`` opens a checkpoint's files; a benchmark makes random weights in their place.

        Raises:
            DeploymentError: the checkpoint or the device cannot be used.
        """
        self.device = resolve_device(config.device)
        threads, of_torch = (config.threads or cpu_threads(native) for native in (True, False))
        torch.set_num_threads(of_torch)
        model = load_config(config.model, config.modeling)
        if config.batch_invariant and self.device.type == "cuda":
            require_invariance(self.device, config.speculation.candidates, model)
        check_recurrent(config, model)
        dtype = resolve_dtype(config.dtype, model, self.device)
        self.max_length = longest_sequence(model, config.max_sequence_length)
        if config.kv_cache_bytes is None and config.kv_cache_fraction is None:
            self.max_length = min(self.max_length, config.num_blocks * config.block_size)
        self.vocab_size = model.vocab_size
        self._block_size, self._one_tile = config.block_size, config.batch_invariant
        self._kernels: CudaForward | None = None
        started = time.perf_counter()
        outline = outline_model(
            config.model, model, dtype, self.device, self.max_length, config.kv_cache_dtype, open_shards=open_shards
        )
        loaded = load_model(outline, self.device)
        self._model = loaded.model
        self.has_head = loaded.model.config.has_head
        reserved = partial(reserved_bytes, config, loaded)
        prepare_weights(self._model, self.device, reserved, config.batch_invariant)
        nbytes = loaded.nbytes
        self._native = native_model(self._model, self.device, config.cpu_step, threads, config.weights)
        if self.device.type == "cpu":
            _log_threads(config.threads, of_torch if self._native is None else threads, self._native is not None)
        if self._native is None:
            if self.device.type == "cpu":
                decode_once(self._model, dtype, self.device, reserved, joined=False)
            join_int8_parts(self._model)
            pack_linears(self._model)
        if isinstance(self._model, AdaptedModel):
            check(self._model, loaded.make_kv_pool)
        weights_loaded = time.perf_counter()
        memory, self.offload_pool = device_memory(self.device), None
        step_bytes = 0
        if memory is not None and (config.automatic or config.kv_cache_fraction is not None):
            config, step_bytes = self._size_step(config, loaded, memory)
        cache = allocate_cache_memory(config, loaded, self.max_length, step_bytes)
        self.offload_pool, self.config = cache.offload_pool, cache.config
        """The settings have the sizes of the step and of the cache that were chosen here."""
        self.max_length = min(self.max_length, self.config.num_blocks * config.block_size)
        self._use(cache.kv_pool, cache.state_pool, config.max_batch_size)
        if "prefill_chunk_tokens" in config.automatic:
            self.config = choose_chunk(self.config, self._compute, self.is_recurrent)
        self.start_phases = {"weights": weights_loaded - started, "kv_cache": time.perf_counter() - weights_loaded}
        """Seconds that each phase of the start took."""
        log.info(
            "%s on %s in %s: %d layers, quantization %s, weights of %.1f MiB, sequences up to %d tokens",
            model.architecture, self.device, dtype, model.num_layers, loaded.scheme, nbytes / 2**20, self.max_length,
        )  # fmt: skip

    def _use(self, kv_pool: KvPool, state_pool: StatePool, max_batch_size: int) -> None:
        """Use this memory of sequences, of which a step has at most ``max_batch_size``, from now on."""
        if self._native is not None:
            try:
                self._native.use(kv_pool, self._block_size)
            except NativeError as error:
                raise DeploymentError(error.refusal) from None
        self._kv_pool, self._state_pool = kv_pool, state_pool
        sizes = (self._block_size, max_batch_size, self.max_length, self._one_tile)
        forward = cuda_forward if self._kernels is None else type(self._kernels)
        self._kernels = forward(self._model, kv_pool, *sizes)

    def _size_step(self, config: EngineConfig, loaded: LoadedModel, memory: DeviceMemory) -> tuple[EngineConfig, int]:
        """Return the settings with the sizes of a step settled, and the bytes that the largest step takes.

        The step is computed before the cache takes the rest of the memory. With kernels a cache of a single block will
        do, as the result is not used; without kernels the cache must be large enough for it.
        """
        longest, blocks = min(self.max_length, config.max_tokens_per_step), 1
        state = loaded.make_state_pool(1)
        self._use(loaded.make_kv_pool(blocks, self._block_size), state, config.max_batch_size)
        if self._kernels is None:
            blocks = -(-longest // self._block_size)
            self._use(loaded.make_kv_pool(blocks, self._block_size), state, config.max_batch_size)

        def compute(size: StepSize) -> None:
            drafts = config.speculation.most_drafts
            chunks = full_step(size, longest, self._block_size, blocks, CONTEXT_ROWS, drafts)
            self.sample(self.run(chunks, ())[0], sampling_rows(chunks)).wait()

        sized = size_step(config, memory, compute)
        del self._kv_pool, self._state_pool
        return sized

    def _compute(self, count: int) -> int:
        """Compute about ``count`` tokens of a prompt, before the cache holds anything; return how many they were."""
        longest, blocks = min(self.max_length, count), self.config.num_blocks
        count = min(count, self.config.max_tokens_per_step)
        chunks = full_step(StepSize(2, count), longest, self._block_size, blocks, context_rows=1)
        self.run(chunks, ())
        return sum(chunk.size for chunk in chunks)

    @property
    def is_recurrent(self) -> bool:
        """Whether the model has layers with recurrent state."""
        return bool(self._model.config.recurrent)

    @property
    def overlaps(self) -> bool:
        """Whether the host can go on while a step is computed; snapshots of states are copied between two steps."""
        return self.device.type == "cuda" and not self.is_recurrent

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process has in memory, reserved on the device, and pinned for the cache."""
        on_gpu = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return process_memory() | {"gpu": on_gpu, "pinned": self.offload_pool.pinned_bytes if self.offload_pool else 0}

    def sample(self, logits: Tensor, rows: abc.Sequence[SamplingRow]) -> PendingSample:
        """Have a token sampled from each row of a step's logits, without waiting for it (``sampler.sample_async``)."""
        return sample_async(logits, rows, None if self._native is None else self._native.draw)

    def native_phases(self) -> dict[str, float]:
        """Return the seconds that each phase of the native step has taken so far; none where PyTorch computes."""
        return {} if self._native is None else self._native.phases()

    @torch.inference_mode()
    def run(
        self, chunks: abc.Sequence[Chunk], copies: abc.Sequence[BlockCopy | StateCopy], chosen: Tensor | None = None
    ) -> tuple[Tensor, dict[int, PromptPart]]:
        """Compute a step.

        Args:
            chunks: what to compute; the sequences' tables have room for it.
            copies: blocks and recurrent states to copy before.
            chosen: on the device, the tokens ``[n]`` of the ``n`` chunks that await theirs, in their order.

        Returns:
            Float32 logits ``[n, vocab]`` of the last token of each chunk that samples and of its drafts, in their
            order; and by index of chunk what its request asks of its prompt, where it asks for something.
        """
        (self.offload_pool or self._kv_pool).copy([copy for copy in copies if isinstance(copy, BlockCopy)])
        if states := [copy for copy in copies if isinstance(copy, StateCopy)]:
            self._state_pool.copy(states)
        ranges = self._ranges(chunks)
        places = [query_range.first for chunk, query_range in zip(chunks, ranges, strict=True) if chunk.awaits]
        token_ids = TokenIds([token for chunk in chunks for token in chunk.tokens], chosen, places)
        last = [
            row
            for chunk, query_range in zip(chunks, ranges, strict=True)
            if chunk.samples
            for row in range(query_range.stop - 1 - len(chunk.drafts), query_range.stop)
        ]
        step: StepStates
        if self._native is not None:
            step = self._native
            logits = step(token_ids.on(self.device).numpy(), ranges, last)
        else:
            step = _TorchStates(self._forward(token_ids, ranges, self._recurrence(chunks, ranges)), self._logits)
            logits = step.logits(last)
        asked = {index: rows for index, one in enumerate(ranges) if (rows := _prompt_rows(chunks[index], one.first))}
        return logits, {
            index: prompt_part(chunks[index].sequence.request, chunks[index].start, rows, step)
            for index, rows in asked.items()
        }

    def warm_up(self) -> None:
        """Prepare for steps: on a GPU, capture those that only decode."""
        started = time.perf_counter()
        if self._kernels is not None:
            self._kernels.capture()
            self.start_phases["graphs"] = time.perf_counter() - started

    def _recurrence(self, chunks: abc.Sequence[Chunk], ranges: list[QueryRange]) -> TorchRecurrence | None:
        """Return what the step's recurrent layers take; None: the model has none."""
        if not self.is_recurrent:
            return None
        states = [chunk.sequence.table.state for chunk in chunks if chunk.sequence.table is not None]
        return TorchRecurrence(self._state_pool, [
            StateRange(one.first, one.start, one.count, state.prompt, state.slot)
            for one, state in zip(ranges, states, strict=True) if state is not None
        ])  # fmt: skip

    def _forward(self, token_ids: TokenIds, ranges: list[QueryRange], recur: TorchRecurrence | None) -> Tensor:
        """Return hidden states ``[tokens, hidden]``."""
        if self._kernels is not None and not any(one.paths for one in ranges):  # the kernels know no trees
            return self._kernels(token_ids, ranges)
        attend = TorchAttention(self._kv_pool, ranges, self._block_size)
        tokens = token_ids.on(self.device)
        states = () if recur is None else (recur,)
        return self._model(pad_rows(tokens), pad_rows(attend.positions), attend, *states)[: len(tokens)]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]`` of ``hidden [tokens, hidden]``."""
        if not len(hidden):
            return torch.empty(0, self.vocab_size, device=self.device)
        if self._kernels is not None:
            return self._model.logits(hidden)
        return self._model.logits(pad_rows(hidden))[: len(hidden)]

    def move(self, table: BlockTable, pairs: abc.Sequence[tuple[int, int]]) -> None:
        """Copy keys and values within a sequence: ``pairs`` of source and target position; all are read first."""
        size = self._block_size
        sources, targets = (
            [table.blocks[position // size] * size + position % size for position in positions]
            for positions in zip(*pairs, strict=True)
        )
        self._kv_pool.move(sources, targets)

    def _ranges(self, chunks: abc.Sequence[Chunk]) -> list[QueryRange]:
        ranges, first = [], 0
        for chunk in chunks:
            table, parents = chunk.sequence.table, chunk.parents
            assert table is not None
            is_chain = all(parent == index - 1 for index, parent in enumerate(parents))
            paths = [] if is_chain else [ancestry(parents, node) for node in range(len(parents))]
            ranges.append(QueryRange(first, chunk.start, chunk.size, table.blocks, paths))
            first += chunk.size
        return ranges


def _prompt_rows(chunk: Chunk, first: int) -> range:
    """Return the rows of the prompt that its request asks something of, of a chunk that begins in row ``first``."""
    request = chunk.sequence.request
    asks = request.sampling.reads_prompt or request.sampling.pooling
    if not asks or chunk.awaits or chunk.sequence.generated:
        return range(0)
    return range(first, first + min(chunk.size, len(request.prompt) - chunk.start))


class _TorchStates(NamedTuple):
    """A step that PyTorch has computed; see ``StepStates``."""

    states: Tensor
    """Hidden states ``[tokens, hidden]``."""
    head: Callable[[Tensor], Tensor]
    """Returns float32 ``[tokens, vocab]`` of some of them."""

    def logits(self, rows: abc.Sequence[int]) -> Tensor:
        """Return float32 ``[rows, vocab]``."""
        return self.head(self._of(rows))

    def hidden(self, rows: abc.Sequence[int]) -> Tensor:
        """Return ``[rows, hidden]``, which the next step does not overwrite."""
        return self._of(rows).clone()

    def _of(self, rows: abc.Sequence[int]) -> Tensor:
        if len(rows) == len(self.states):
            return self.states
        if isinstance(rows, range):
            return self.states[rows.start : rows.stop]
        return self.states[to_device(np.array(rows, np.int64), self.states.device)]
