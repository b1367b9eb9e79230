"""Attention over the paged KV cache by ``kernels``; equal to ``paged``, its reference, but for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention import kernels, tiles
from inflight.engine.attention.block_tables import HEADER, BlockTables
from inflight.engine.attention.paged import KvTensors, Span
from inflight.engine.attention.plan import Plan, plan
from inflight.engine.attention.store import StoredKv, store
from inflight.engine.attention.tiles import LONGEST_SHORT
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
    short: Tensor
    """The spans of up to ``tiles.LONGEST_SHORT`` tokens, by their rows there."""
    chunks: Tensor
    """The others."""
    longest_chunk: int
    """Tokens of the longest of them."""
    longest_short: int = 1
    """Tokens of the longest short one."""

    @classmethod
    def of(cls, token_ids: TokenIds, spans: Sequence[Span], tables: BlockTables) -> tuple[Tensor, StepLayout]:
        """Return a step's token ids on the device, and its layout; both go there in one transfer.

        Args:
            token_ids: packed.
            spans: of the step, in the order of the packed tokens.
            tables: of the sequences; they are brought up to date.
        """
        step = tables.place(spans)
        is_short = step.counts <= LONGEST_SHORT
        short, chunks = step.rows[is_short], step.rows[~is_short]
        longest_short, longest = (int(step.counts[which].max(initial=1)) for which in (is_short, ~is_short))
        parts = (np.asarray(token_ids.known), step.positions, step.slots, short, chunks)
        sizes = [part.size for part in parts]
        news = (step.changed, step.values, np.array(token_ids.places, np.int64))
        packed = to_device(np.concatenate((*parts, *news), dtype=np.int64), tables.tensor.device)
        layout, changed, values, places = packed.split([sum(sizes), *(part.size for part in news)])
        tables.update(changed, values)
        tokens, positions, slots, on_short, on_chunks = layout.int().split(sizes)
        if token_ids.chosen is not None:
            tokens.index_copy_(0, places, token_ids.chosen.int())
        return tokens, cls(positions, slots, tables.tensor, on_short, on_chunks, longest, longest_short)


class KernelAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``."""

    def __init__(self, layers: Sequence[StoredKv], layout: StepLayout, block_size: int, one_tile: bool = False) -> None:
        """
        Args:
            layers: the cache's memory; see ``stored_layers``.
            layout: of the step.
            block_size: tokens per block.
            one_tile: whether all spans take ``tiles.common_tile``, so that a token's bits do not depend on its chunk.
        """
        self._layers, self._layout, self._block_size = layers, layout, block_size
        self._one_tile = one_tile
        self._plans: dict[int | None, list[Plan]] = {}
        """Of this step, by window: of all layers with that window."""

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
        if window not in self._plans:
            self._plans[window] = self._planned(query, len(stored.keys), window)
        seen = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in self._plans[window]:
            kernels.attend(query, stored, seen, layout.spans, part, size, scale)
        return seen

    def _planned(self, query: Tensor, kv_heads: int, window: int | None) -> list[Plan]:
        """Return what the programs do for the step's spans."""
        layout, card, (_, heads, dim) = self._layout, tiles.card_of(query.device), query.shape
        group, dtype = heads // kv_heads, query.dtype
        short, long = tiles.short_tile(dtype, dim, group), tiles.long_tile(card, dtype, dim, group)
        if self._one_tile:
            short = long = tiles.common_tile(dtype, dim, group)
        capacity = (layout.spans.shape[1] - HEADER) * self._block_size
        plans = []
        if len(layout.chunks):
            plans.append(plan(layout.spans, layout.chunks, layout.longest_chunk, long, group, window))
        if len(layout.short):
            most = len(layout.short) * -(-layout.longest_short * group // short.rows) * -(-capacity // short.keys)
            room = kernels.room_for_parts(layout.longest_short, group, kv_heads, dim, short, most)
            shares = tiles.shares(card, kv_heads)
            plans.append(plan(layout.spans, layout.short, layout.longest_short, short, group, window, shares, room))
        return plans


def stored_layers(tensors: KvTensors) -> list[StoredKv]:
    """Return the cache's memory layer by layer."""
    return [StoredKv(*parts) for parts in zip(tensors.keys, tensors.values, *tensors.scales, strict=True)]
