"""CUDA graphs of decode steps: a step of a few hundred kernels becomes one launch.

A step that only decodes has the same kernels whatever its tokens; it is captured once for each of a few batch sizes, on
inputs that stay where they are, and a step is padded to the next size. Rows of padding store nothing and see nothing.
The model knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.block_tables import BlockTables
from inflight.engine.attention.kernel_attention import StepLayout
from inflight.engine.attention.paged import Span
from inflight.engine.transfer import OwnStream, TokenIds, to_device

Run = Callable[[Tensor, StepLayout], Tensor]
"""The model's forward, of token ids and where they lie; returns hidden states ``[tokens, hidden]``."""


class Captured(Protocol):
    """A captured computation."""

    def replay(self) -> Tensor:
        """Compute again, from what its inputs hold now; the result is overwritten by the next replay."""


class CudaGraph:
    """A computation captured by CUDA."""

    def __init__(self, compute: Callable[[], Tensor], pool: object, stream: OwnStream) -> None:
        """
        Args:
            compute: what to capture; launches kernels and waits for none.
            pool: memory that all graphs share, since only one runs at a time (``torch.cuda.graph_pool_handle()``).
            stream: the stream to capture on, of nobody but the graphs of one engine. cuBLAS has a workspace for each
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

    def replay(self) -> Tensor:
        """Compute again, from what its inputs hold now."""
        self._graph.replay()
        return self._result


class DecodeGraphs:
    """Captured decode steps, by batch size."""

    def __init__(self, run: Run, tables: BlockTables, capture: Callable[[Callable[[], Tensor]], Captured]) -> None:
        """
        Args:
            run: the model's forward.
            tables: of the sequences that run; a step has as many as there is room for.
            capture: runs a computation and returns it captured.
        """
        self._tables, largest = tables, tables.rows
        self._inputs = torch.zeros(4, largest, dtype=torch.int32, device=tables.tensor.device)
        """Tokens, positions, slots and rows of the tables."""
        self._graphs: dict[int, Captured] = {}
        for size in reversed(batch_sizes(largest)):  # the largest first: the others fit into its memory
            self._pad(TokenIds([]), [], size)
            self._graphs[size] = capture(self._computation(run, size))

    def __call__(self, token_ids: TokenIds, spans: Sequence[Span]) -> Tensor | None:
        """Return hidden states ``[tokens, hidden]`` of a step that only decodes; None: it is not one, or too large.

        They are overwritten by the next call.
        """
        size = next((size for size in sorted(self._graphs) if size >= len(spans)), None)
        if size is None or len(token_ids.known) != len(spans):
            return None
        self._pad(token_ids, spans, size)
        return self._graphs[size].replay()[: len(spans)]

    def _computation(self, run: Run, size: int) -> Callable[[], Tensor]:
        tokens, positions, slots, rows = (part[:size] for part in self._inputs)
        layout = StepLayout(positions, slots, self._tables.tensor, rows, rows[:0], 0)
        return lambda: run(tokens, layout)

    def _pad(self, token_ids: TokenIds, spans: Sequence[Span], size: int) -> None:
        """Put a step into the inputs."""
        tables, count = self._tables, len(spans)
        step = tables.place(spans)
        inputs = np.zeros((len(self._inputs), size), np.int64)
        inputs[2], inputs[3] = -1, tables.rows + np.arange(size)
        inputs[:, :count] = token_ids.known, step.positions, step.slots, step.rows
        news = (step.changed, step.values, np.array(token_ids.places, np.int64))
        packed = to_device(np.concatenate((inputs.reshape(-1), *news)), self._inputs.device)
        ids, changed, values, places = packed.split([inputs.size, *(part.size for part in news)])
        tables.update(changed, values)
        self._inputs[:, :size].copy_(ids.view(inputs.shape))
        if token_ids.chosen is not None:
            self._inputs[0].index_copy_(0, places, token_ids.chosen.int())


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes to capture: powers of two and what lies halfway; at most a third of a step is padding."""
    powers = [1 << bit for bit in range(largest.bit_length())]
    halfway = [power * 3 // 2 for power in powers[2:]]
    return sorted({size for size in powers + halfway if size < largest} | {largest})
