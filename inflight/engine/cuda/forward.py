"""The model's forward on a CUDA device: kernels for attention, graphs for steps that only decode, one transfer in."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from inflight.engine.attention.block_tables import BlockTables
from inflight.engine.attention.kernel_attention import KernelAttention, StepLayout, stored_layers
from inflight.engine.attention.paged import KvTensors, Span
from inflight.engine.cuda.graphs import CudaGraph, DecodeGraphs
from inflight.engine.models.layers import Attend
from inflight.engine.transfer import OwnStream, TokenIds

log = logging.getLogger(__name__)


class Model(Protocol):
    """What is needed of a model."""

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]``."""


class CudaForward:
    """Runs a model's steps."""

    def __init__(
        self, model: Model, tensors: KvTensors, block_size: int, max_batch_size: int, max_length: int,
        one_tile: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            model: on a CUDA device.
            tensors: the KV cache's memory, there too.
            block_size: tokens per block.
            max_batch_size: sequences of a step.
            max_length: tokens of a sequence.
            one_tile: of ``KernelAttention``.
        """
        self._model, self._block_size, self._one_tile = model, block_size, one_tile
        self._device = tensors.keys.device
        # Which device is current is each thread's own affair, and Triton launches on the current one.
        self._here = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        self._layers = stored_layers(tensors)
        self.tables = BlockTables(max_batch_size, -(-max_length // block_size), block_size, self._device)
        self.graphs: DecodeGraphs | None = None
        """None until there are some."""

    def with_cache(
        self, tensors: KvTensors, block_size: int, max_batch_size: int, max_length: int, one_tile: bool = False
    ) -> CudaForward:
        """Return the same for another cache; its graphs are not captured yet."""
        return CudaForward(self._model, tensors, block_size, max_batch_size, max_length, one_tile)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture decode steps."""
        started, before = time.perf_counter(), torch.cuda.memory_reserved(self._device)
        with self._here:
            capture = partial(CudaGraph, pool=torch.cuda.graph_pool_handle(), stream=OwnStream(self._device))
            self.graphs = DecodeGraphs(self.run, self.tables, capture)
        log.info(
            "captured decode steps of up to %d in %.1f s; they take %.1f MiB",
            self.tables.rows, time.perf_counter() - started,
            (torch.cuda.memory_reserved(self._device) - before) / 2**20,
        )  # fmt: skip

    def __call__(self, token_ids: TokenIds, spans: Sequence[Span]) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed tokens; the next call may overwrite them."""
        try:
            with self._here:
                hidden = self.graphs(token_ids, spans) if self.graphs else None
                if hidden is not None:
                    return hidden
                return self.run(*StepLayout.of(token_ids, spans, self.tables))
        except Exception:
            self.tables.forget()  # they may not have been sent
            raise

    def run(self, token_ids: Tensor, layout: StepLayout) -> Tensor:
        """Return hidden states ``[tokens, hidden]``, launched kernel by kernel."""
        attend = KernelAttention(self._layers, layout, self._block_size, self._one_tile)
        return self._model(token_ids, layout.positions, attend)
