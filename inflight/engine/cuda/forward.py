"""The model's forward on a CUDA device: kernels for attention, graphs for steps that only decode, one transfer in.

A step that only decodes has the same kernels whatever its tokens; it is captured once for each of a few batch sizes, on
inputs that stay at their addresses, and a step is padded to the next size: a few hundred kernels become one launch.
Rows of padding store nothing and attend to nothing. The model itself is unchanged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.attention.triton_backend import BlockTables, StepLayout, TritonAttention
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.transfer import OwnStream, TokenIds

log = logging.getLogger(__name__)

Run = Callable[[Tensor, StepLayout], Tensor]
"""The model's forward, of token ids and where they lie; returns hidden states ``[tokens, hidden]``."""
Compute = Callable[[], Tensor]
"""Computes from what its inputs hold now; what has been captured overwrites its last result."""


class CudaGraph:
    """A computation captured by CUDA."""

    def __init__(self, compute: Compute, pool: object, stream: OwnStream) -> None:
        """
        Args:
            compute: what to capture; launches kernels and waits for none.
            pool: memory that all graphs share, since only one runs at a time (``torch.cuda.graph_pool_handle()``).
            stream: the stream to capture on, which only the graphs of one engine use. cuBLAS has a workspace for each
                stream, whose address the graphs hold, and which PyTorch gives up when a graph of the stream dies.
        """
        self._stream = stream
        current = torch.cuda.current_stream()
        stream.stream.wait_stream(current)
        with torch.cuda.stream(stream.stream):  # libraries allocate, and Triton compiles, on the first calls
            for _ in range(2):
                compute()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread is held to what may be captured: another engine of the process goes on as it was.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream.stream, capture_error_mode="thread_local"):
            self._result = compute()
        current.wait_stream(stream.stream)

    def __call__(self) -> Tensor:
        """Compute again, from what its inputs hold now."""
        self._graph.replay()
        return self._result


class DecodeGraphs:
    """Captured decode steps, one for each of some batch sizes."""

    def __init__(self, run: Run, tables: BlockTables, capture: Callable[[Compute], Compute]) -> None:
        """``tables``: a step has as many sequences as they have rows; ``capture`` returns a computation captured."""
        self._tables, largest = tables, tables.rows
        self._inputs = torch.zeros(4, largest, dtype=torch.int32, device=tables.tensor.device)
        """Tokens, positions, slots and rows of the tables."""
        self._graphs: dict[int, Compute] = {}
        for size in reversed(batch_sizes(largest)):  # the largest first: the others fit into its memory
            self._pad(TokenIds([]), [], size)
            tokens, positions, slots, rows = (part[:size] for part in self._inputs)
            layout = StepLayout(positions, slots, tables.tensor, rows, rows[:0], 0)
            self._graphs[size] = capture(partial(run, tokens, layout))

    def __call__(self, token_ids: TokenIds, ranges: Sequence[QueryRange]) -> Tensor | None:
        """Return hidden states ``[tokens, hidden]`` of a step that only decodes; None: it is not one, or too large.

        They are overwritten by the next call.
        """
        size = next((size for size in sorted(self._graphs) if size >= len(ranges)), None)
        if size is None or len(token_ids.known) != len(ranges):
            return None
        self._pad(token_ids, ranges, size)
        return self._graphs[size]()[: len(ranges)]

    def _pad(self, token_ids: TokenIds, ranges: Sequence[QueryRange], size: int) -> None:
        """Write a step into the inputs, padded to ``size`` tokens."""
        tables, count = self._tables, len(ranges)
        step = tables.indices(ranges)
        inputs = np.zeros((len(self._inputs), size), np.int64)
        inputs[2], inputs[3] = -1, tables.rows + np.arange(size)
        inputs[:, :count] = token_ids.known, step.positions, step.slots, step.rows
        self._inputs[:, :size].copy_(tables.send(token_ids, step, inputs.reshape(-1)).view(inputs.shape))


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes to capture: powers of two and the middles between; at most a third of a step is padding."""
    powers = [1 << bit for bit in range(largest.bit_length())]
    halfway = [power * 3 // 2 for power in powers[2:]]
    return sorted({size for size in powers + halfway if size < largest} | {largest})


class CudaForward:
    """Runs a model's steps on a CUDA device."""

    def __init__(
        self, model: DecoderModel, kv_pool: KvPool, block_size: int, max_batch_size: int, max_length: int,
        one_tile: bool = False,
    ) -> None:  # fmt: skip
        """``max_length``: tokens of a sequence, at most; ``one_tile``: as in ``TritonAttention``."""
        self._model, self._block_size, self._one_tile = model, block_size, one_tile
        self._device = kv_pool.device
        # Which device is current is each thread's own affair, and Triton launches on the current one.
        self._here = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        self._layers = list(kv_pool.layers.values())  # all layers have attention
        self.tables = BlockTables(max_batch_size, -(-max_length // block_size), block_size, self._device)
        self.graphs: DecodeGraphs | None = None
        """The captured decode steps; None until ``capture``."""

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

    def __call__(self, token_ids: TokenIds, ranges: Sequence[QueryRange]) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed tokens; the next call may overwrite them."""
        try:
            with self._here:
                hidden = self.graphs(token_ids, ranges) if self.graphs else None
                if hidden is not None:
                    return hidden
                return self.run(*StepLayout.of(token_ids, ranges, self.tables))
        except Exception:
            self.tables.forget()  # they may not have been sent
            raise

    def run(self, token_ids: Tensor, layout: StepLayout) -> Tensor:
        """Return hidden states ``[tokens, hidden]``, launched kernel by kernel."""
        attend = TritonAttention(self._layers, layout, self._block_size, self._one_tile)
        return self._model(token_ids, layout.positions, attend)
