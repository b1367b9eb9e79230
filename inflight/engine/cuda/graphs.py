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

from inflight.engine.attention.kernel_attention import HEADER, StepLayout, on_host, places, span_table
from inflight.engine.attention.paged import Span
from inflight.engine.transfer import to_device

Run = Callable[[Tensor, StepLayout], Tensor]
"""The model's forward, of token ids and where they lie; returns hidden states ``[tokens, hidden]``."""


class Captured(Protocol):
    """A captured computation."""

    def replay(self) -> Tensor:
        """Compute again, from what its inputs hold now; the result is overwritten by the next replay."""


class CudaGraph:
    """A computation captured by CUDA."""

    def __init__(self, compute: Callable[[], Tensor], pool: object) -> None:
        """
        Args:
            compute: what to capture; launches kernels and waits for none.
            pool: memory that all graphs share, since only one runs at a time (``torch.cuda.graph_pool_handle()``).
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries allocate, and Triton compiles, on the first calls
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = compute()

    def replay(self) -> Tensor:
        """Compute again, from what its inputs hold now."""
        self._graph.replay()
        return self._result


class DecodeGraphs:
    """Captured decode steps, by batch size."""

    def __init__(
        self,
        run: Run,
        max_batch_size: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        capture: Callable[[Callable[[], Tensor]], Captured],
    ) -> None:
        """
        Args:
            run: the model's forward.
            max_batch_size: of a step.
            max_blocks: of a sequence.
            block_size: tokens per block.
            device: where the model is.
            capture: runs a computation and returns it captured.
        """
        self._block_size = block_size
        self._ids = torch.zeros(3, max_batch_size, dtype=torch.int32, device=device)
        """Tokens, positions and slots."""
        self._spans = torch.zeros(max_batch_size, HEADER + max_blocks, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_batch_size, dtype=torch.int32, device=device)
        self._graphs: dict[int, Captured] = {}
        for size in reversed(batch_sizes(max_batch_size)):  # the largest first: the others fit into its memory
            self._pad([], [], size)
            self._graphs[size] = capture(self._computation(run, size))

    def __call__(self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span]) -> Tensor | None:
        """Return hidden states ``[tokens, hidden]`` of a step that only decodes; None: it is not one, or too large.

        They are overwritten by the next call.
        """
        size = next((size for size in sorted(self._graphs) if size >= len(spans)), None)
        if size is None or len(token_ids) != len(spans):
            return None
        self._pad(token_ids, spans, size)
        return self._graphs[size].replay()[: len(spans)]

    def _computation(self, run: Run, size: int) -> Callable[[], Tensor]:
        tokens, positions, slots = (row[:size] for row in self._ids)
        layout = StepLayout(positions, slots, self._spans[:size], self._rows[:size], self._rows[:0], 0)
        return lambda: run(tokens, layout)

    def _pad(self, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], size: int) -> None:
        """Put a step into the inputs."""
        count = len(spans)
        table = np.zeros((size, HEADER + max((len(span.blocks) for span in spans), default=0)), np.int32)
        table[:, :HEADER] = np.stack((np.arange(size), np.full(size, -1), np.ones(size)), axis=1)
        ids = np.zeros(self._ids.shape, np.int32)
        ids[2] = -1
        if count:
            table[:count] = span_table(spans)
            ids[:, :count] = on_host(token_ids), *places(table[:count], self._block_size)
        self._ids.copy_(to_device(ids, self._ids.device), non_blocking=True)
        if isinstance(token_ids, Tensor):
            self._ids[0, :count] = token_ids
        self._spans[:size, : table.shape[1]].copy_(to_device(table, self._ids.device), non_blocking=True)


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes to capture: powers of two and what lies halfway; at most a third of a step is padding."""
    powers = [1 << bit for bit in range(largest.bit_length())]
    halfway = [power * 3 // 2 for power in powers[2:]]
    return sorted({size for size in powers + halfway if size < largest} | {largest})
