"""Attention over the paged KV cache by ``kernels``; equal to ``paged``, its reference, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention import kernels
from inflight.engine.attention.paged import KvTensors, Span
from inflight.engine.attention.store import StoredKv, store
from inflight.engine.transfer import to_device

HEADER = int(kernels.HEADER.value)


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens lie: int32 tensors on the device."""

    positions: Tensor
    """``[tokens]``."""
    slots: Tensor
    """``[tokens]``: where each one's key and value go; -1: nowhere."""
    spans: Tensor
    """``[spans, HEADER + blocks]``: the first row in the packed tokens, the start in the sequence, tokens, blocks."""
    singles: Tensor
    """The spans of one token, by their index."""
    chunks: Tensor
    """The others."""
    longest_chunk: int
    """Tokens of the longest of them."""

    @classmethod
    def of(
        cls, token_ids: Sequence[int] | Tensor, spans: Sequence[Span], block_size: int, device: torch.device
    ) -> tuple[Tensor, StepLayout]:
        """Return a step's token ids on the device, and its layout; both go there in one transfer.

        Args:
            token_ids: packed; those that are on the device stay there.
            spans: of the step, in the order of the packed tokens.
            block_size: tokens per block.
            device: where to.
        """
        table = span_table(spans)
        singles, chunks = np.flatnonzero(table[:, 2] == 1), np.flatnonzero(table[:, 2] > 1)
        parts = (on_host(token_ids), *places(table, block_size), table.reshape(-1), singles, chunks)
        packed = to_device(np.concatenate(parts).astype(np.int32), device)
        tokens, positions, slots, flat, on_singles, on_chunks = packed.split([part.size for part in parts])
        tokens = token_ids.int() if isinstance(token_ids, Tensor) else tokens
        longest = int(table[chunks, 2].max()) if chunks.size else 0
        return tokens, cls(positions, slots, flat.view(table.shape), on_singles, on_chunks, longest)


def on_host(token_ids: Sequence[int] | Tensor) -> np.ndarray:
    """Return token ids as far as the host has them: zeros in place of those that are on the device."""
    return np.zeros(len(token_ids), np.int32) if isinstance(token_ids, Tensor) else np.asarray(token_ids)


def span_table(spans: Sequence[Span]) -> np.ndarray:
    """Return ``StepLayout.spans`` on the host; rows are padded with block 0, which no kernel reads."""
    width = max(len(span.blocks) for span in spans)
    table = np.zeros((len(spans), HEADER + width), np.int32)
    for row, span in zip(table, spans, strict=True):
        row[:HEADER] = span.first, span.start, span.count
        row[HEADER : HEADER + len(span.blocks)] = span.blocks
    return table


def places(table: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the position and the slot of every packed token; ``table``: of spans, in the order of their tokens."""
    first, start, counts = table[:, :HEADER].T
    rows = np.repeat(np.arange(len(table)), counts)
    positions = np.arange(len(rows)) + (start - first)[rows]
    blocks = table[rows, HEADER + positions // block_size]
    return positions, blocks * block_size + positions % block_size


class KernelAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``."""

    def __init__(self, layers: Sequence[StoredKv], layout: StepLayout, block_size: int) -> None:
        """
        Args:
            layers: the cache's memory; see ``stored_layers``.
            layout: of the step.
            block_size: tokens per block.
        """
        self._layers, self._layout, self._block_size = layers, layout, block_size

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Store keys and values, and attend."""
        layout, stored, size = self._layout, self._layers[layer], self._block_size
        store(key, value, layout.slots, stored)
        seen = torch.empty_like(query)
        if len(layout.singles):
            # By the capacity, not by what is in the batch: the order of summation must not depend on neighbours.
            splits = kernels.num_splits(stored.keys.shape[1], query.dtype, query.shape[-1])
            kernels.attend(query, stored, seen, layout.spans, layout.singles, 1, size, window, scale, splits)
        if len(layout.chunks):
            longest = layout.longest_chunk
            kernels.attend(query, stored, seen, layout.spans, layout.chunks, longest, size, window, scale)
        return seen


def stored_layers(tensors: KvTensors) -> list[StoredKv]:
    """Return the cache's memory layer by layer."""
    return [StoredKv(*parts) for parts in zip(tensors.keys, tensors.values, *tensors.scales, strict=True)]
