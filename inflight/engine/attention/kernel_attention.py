"""Attention over the paged KV cache by ``kernels``; equal to ``paged``, its reference, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention import kernels
from inflight.engine.attention.block_tables import BlockTables
from inflight.engine.attention.paged import KvTensors, Span
from inflight.engine.attention.store import StoredKv, store
from inflight.engine.transfer import TokenIds, to_device


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens lie: int32 tensors on the device."""

    positions: Tensor
    """``[tokens]``."""
    slots: Tensor
    """``[tokens]``: where each one's key and value go; -1: nowhere."""
    spans: Tensor
    """``BlockTables.tensor``."""
    singles: Tensor
    """The spans of one token, by their rows there."""
    chunks: Tensor
    """The others."""
    longest_chunk: int
    """Tokens of the longest of them."""

    @classmethod
    def of(cls, token_ids: TokenIds, spans: Sequence[Span], tables: BlockTables) -> tuple[Tensor, StepLayout]:
        """Return a step's token ids on the device, and its layout; both go there in one transfer.

        Args:
            token_ids: packed.
            spans: of the step, in the order of the packed tokens.
            tables: of the sequences; they are brought up to date.
        """
        step = tables.place(spans)
        singles, chunks = step.rows[step.counts == 1], step.rows[step.counts > 1]
        parts = (np.asarray(token_ids.known), step.positions, step.slots, singles, chunks)
        sizes = [part.size for part in parts]
        news = (step.changed, step.values, np.array(token_ids.places, np.int64))
        packed = to_device(np.concatenate((*parts, *news), dtype=np.int64), tables.tensor.device)
        layout, changed, values, places = packed.split([sum(sizes), *(part.size for part in news)])
        tables.update(changed, values)
        tokens, positions, slots, on_singles, on_chunks = layout.int().split(sizes)
        if token_ids.chosen is not None:
            tokens.index_copy_(0, places, token_ids.chosen.int())
        return tokens, cls(positions, slots, tables.tensor, on_singles, on_chunks, int(step.counts.max()))


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
        store(key, value, *self.place(layer))
        return self.attend(layer, query, window, scale)

    def place(self, layer: int) -> tuple[Tensor, StoredKv]:
        """Return where the step's keys and values of a layer go: slots ``[tokens]``, and their memory."""
        return self._layout.slots, self._layers[layer]

    def attend(self, layer: int, query: Tensor, window: int | None, scale: float) -> Tensor:
        """Attend over what is stored; arguments and result are those of ``layers.Attend``."""
        layout, stored, size = self._layout, self._layers[layer], self._block_size
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
