"""Attention over the paged KV cache by Triton kernels; but for rounding it equals ``torch_backend``, its reference.

Block tables stay on the device, and a step sends only their new entries. Each sequence has a row while it runs. With 64
sequences of 8k tokens a step would otherwise turn 32,000 block ids from lists into an array and send them, although
only four are new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention import plan, triton_kernels
from inflight.engine.attention.store import store
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.kvcache.blocks import Blocks
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.transfer import TokenIds, to_device

HEADER = int(plan.HEADER.value)
_PROGRAMS_PER_PROCESSOR = 4
"""How many programs with tiles of few rows run at once on a multiprocessor."""


class StepIndices(NamedTuple):
    """Where a step's tokens are, and what changes in the tables, on the host: int64 arrays."""

    rows: np.ndarray
    """``[ranges]``: the row of each range in the tables."""
    counts: np.ndarray
    """``[ranges]``: the tokens of each range."""
    positions: np.ndarray
    """``[tokens]``: the position of each token in its sequence."""
    slots: np.ndarray
    """``[tokens]``: the slot of each token's key and value."""
    changed: np.ndarray
    """Indices of the entries, counted through all rows, that must change before the step."""
    values: np.ndarray
    """The new values of these entries."""


@dataclass(slots=True)
class _Row:
    number: int
    blocks: Sequence[int]
    """The reference keeps the list alive, so that no other list gets its identity."""
    sent: int = 0
    """How many of the blocks the device has, unless some were replaced."""
    replaced: int = -1
    """``Blocks.replaced`` when they were sent; -1: the list does not count replacements."""


class BlockTables:
    """The block tables of the running sequences."""

    def __init__(self, rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        """``rows``: sequences of a step, at most; ``max_blocks``: blocks of a sequence, at most."""
        self.block_size, self.rows = block_size, rows
        self.tensor = torch.zeros(2 * rows, HEADER + max_blocks, dtype=torch.int32, device=device)
        """``[2 * rows, HEADER + blocks]``: the first row in the packed tokens, the start in the sequence, tokens,
        blocks. Behind the sequences' rows are those of padding, one for each token of a step that may be padding: it
        attends to nothing. The tensor stays at its address."""
        padding = torch.tensor([[token, -1, 1] for token in range(rows)], dtype=torch.int32)
        self.tensor[rows:, :HEADER] = padding.to(device)
        self._host = np.zeros((rows, max_blocks), np.int64)
        self._rows: dict[int, _Row] = {}
        """By the identity of the sequence's blocks; the row that was used last is at the end."""

    def indices(self, ranges: Sequence[QueryRange]) -> StepIndices:
        """Return where a step's tokens are; ``send`` must be called with them before the next call."""
        width = self.tensor.shape[1]
        fresh = [(self._row(query_range.blocks), query_range) for query_range in ranges]
        entries = [(row.number, query_range.first, query_range.start, query_range.count) for row, query_range in fresh]
        rows, first, start, counts = np.array(entries, np.int64).reshape(-1, 4).T
        changed, values = list[int](), list[int]()
        for row, query_range in fresh:
            begin, unsent = self._take_unsent(row, query_range.blocks)
            self._host[row.number, begin : begin + len(unsent)] = unsent
            place = row.number * width + HEADER + begin
            changed.extend(range(place, place + len(unsent)))
            values.extend(unsent)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(owner)) + (start - first)[owner]
        blocks = self._host[rows[owner], positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        heads = (rows[:, None] * width + np.arange(HEADER)).reshape(-1)
        header = np.stack((first, start, counts), axis=1).reshape(-1)
        return StepIndices(
            rows, counts, positions, slots, np.concatenate((heads, np.array(changed, np.int64))),
            np.concatenate((header, np.array(values, np.int64))),
        )  # fmt: skip

    def send(self, token_ids: TokenIds, step: StepIndices, layout: np.ndarray) -> Tensor:
        """Change the tables on the device, and return a step's layout there, int32; both go in one transfer.

        ``layout`` is int64 and begins with the known token ids; those that only the device knows are filled in.
        """
        parts = (layout, step.changed, step.values, np.array(token_ids.places, np.int64))
        packed = to_device(np.concatenate(parts), self.tensor.device)
        sent, changed, values, places = packed.split([part.size for part in parts])
        self.tensor.view(-1).index_copy_(0, changed, values.int())
        if token_ids.chosen is not None:
            sent.index_copy_(0, places, token_ids.chosen)
        return sent.int()

    def forget(self) -> None:
        """Send whole tables with the next step, since what the device has is unknown."""
        self._rows.clear()

    def _row(self, blocks: Sequence[int]) -> _Row:
        row = self._rows.pop(id(blocks), None)
        if row is None:
            free = len(self._rows) < len(self._host)
            number = len(self._rows) if free else self._rows.pop(next(iter(self._rows))).number
            row = _Row(number, blocks)
        self._rows[id(blocks)] = row
        return row

    @staticmethod
    def _take_unsent(row: _Row, blocks: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the blocks of a row that the device does not have, behind the first one's index; note them as sent."""
        replaced = blocks.replaced if isinstance(blocks, Blocks) else -1
        sent = row.sent if replaced >= 0 and replaced == row.replaced else 0
        row.sent, row.replaced = len(blocks), replaced
        return sent, blocks[sent:]


@dataclass(frozen=True)
class StepLayout:
    """Where a step's tokens are: int32 tensors on the device."""

    positions: Tensor
    """``[tokens]``: the position of each token in its sequence."""
    slots: Tensor
    """``[tokens]``: the slot of each token's key and value; -1: none."""
    ranges: Tensor
    """``BlockTables.tensor``."""
    short: Tensor
    """The ranges of up to ``plan.LONGEST_SHORT`` tokens, by their rows in ``ranges``."""
    chunks: Tensor
    """The longer ranges, by their rows in ``ranges``."""
    longest_chunk: int
    """Tokens of the longest of ``chunks``."""
    longest_short: int = 1
    """Tokens of the longest of ``short``."""

    @classmethod
    def of(cls, token_ids: TokenIds, ranges: Sequence[QueryRange], tables: BlockTables) -> tuple[Tensor, StepLayout]:
        """Return a step's token ids on the device, and its layout; both go there in one transfer.

        ``ranges`` are in the order of the packed tokens; ``tables`` are brought up to date.
        """
        step = tables.indices(ranges)
        is_short = step.counts <= plan.LONGEST_SHORT
        short, chunks = step.rows[is_short], step.rows[~is_short]
        longest_short, longest = (int(step.counts[which].max(initial=1)) for which in (is_short, ~is_short))
        parts = (np.asarray(token_ids.known), step.positions, step.slots, short, chunks)
        sent = tables.send(token_ids, step, np.concatenate(parts, dtype=np.int64))
        tokens, positions, slots, on_short, on_chunks = sent.split([part.size for part in parts])
        return tokens, cls(positions, slots, tables.tensor, on_short, on_chunks, longest, longest_short)


class TritonAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``."""

    def __init__(self, layers: Sequence[StoredKv], layout: StepLayout, block_size: int, one_tile: bool = False) -> None:
        """``one_tile``: all ranges take ``plan.common_tile``, so that a token's bits do not depend on its chunk."""
        self._layers, self._layout, self._block_size, self._one_tile = layers, layout, block_size, one_tile
        self._plans: dict[tuple[int | None, int, int, int], list[plan.AttentionPlan]] = {}
        """Plans of this step by window and shape, for all layers that have them."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, options: AttentionOptions
    ) -> Tensor:
        """Store keys and values, and attend."""
        if key is not None and value is not None:
            store(key, value, *self.target(layer))
        return self.attend(layer, query, options)

    def target(self, layer: int) -> tuple[Tensor, StoredKv]:
        """Return where the step's keys and values of a layer go: slots ``[tokens]``, and their memory."""
        return self._layout.slots, self._layers[layer]

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend over what is stored; arguments and result are those of ``layers.Attend``."""
        layout, stored, size = self._layout, self._layers[layer], self._block_size
        key = (options.window, len(stored.keys), *query.shape[1:])
        if key not in self._plans:
            self._plans[key] = self._make_plans(query, len(stored.keys), options.window)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in self._plans[key]:
            triton_kernels.attend(
                query, stored, out, layout.ranges, part, size, options.scale, options.softcap, options.sinks
            )
        return out

    def _make_plans(self, query: Tensor, kv_heads: int, window: int | None) -> list[plan.AttentionPlan]:
        """Return the plans for the step's ranges: one for the chunks and one for the short ones."""
        layout, card, (_, heads, dim) = self._layout, plan.card_of(query.device), query.shape
        group, dtype = heads // kv_heads, query.dtype
        short, long = plan.short_tile(dtype, dim, group), plan.long_tile(card, dtype, dim, group)
        if self._one_tile:
            short = long = plan.common_tile(dtype, dim, group)
        capacity = (layout.ranges.shape[1] - HEADER) * self._block_size
        plans = []
        if len(layout.chunks):
            plans.append(plan.plan(layout.ranges, layout.chunks, layout.longest_chunk, long, group, window))
        if len(layout.short):
            most = len(layout.short) * -(-layout.longest_short * group // short.rows) * -(-capacity // short.keys)
            room = triton_kernels.room_for_parts(layout.longest_short, group, kv_heads, dim, short, most)
            shares = max(1, -(-card.processors * _PROGRAMS_PER_PROCESSOR // kv_heads))  # to fill the card once
            plans.append(
                plan.plan(layout.ranges, layout.short, layout.longest_short, short, group, window, shares, room)
            )
        return plans
