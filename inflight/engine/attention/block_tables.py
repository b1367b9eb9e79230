"""Block tables on the device: they stay there, and a step sends what is new in them.

Each sequence has a row while it runs. At 64 sequences of 8k tokens a step would otherwise turn 32,000 block numbers
from lists into an array and send them, of which four are new.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention import plan
from inflight.engine.attention.paged import Span
from inflight.engine.kv.blocks import Blocks

HEADER = int(plan.HEADER.value)


class StepPlaces(NamedTuple):
    """Where a step's tokens lie, on the host: int64 arrays."""

    rows: np.ndarray
    """``[spans]``: in the tables."""
    counts: np.ndarray
    """``[spans]``: tokens."""
    positions: np.ndarray
    """``[tokens]``."""
    slots: np.ndarray
    """``[tokens]``: where each one's key and value go."""
    changed: np.ndarray
    """Places in the tables, counted through all rows, that are to change before the step."""
    values: np.ndarray
    """What they change to."""


@dataclass(slots=True)
class _Row:
    number: int
    blocks: Sequence[int]
    """Held, so that nothing else gets its identity."""
    sent: int = 0
    replaced: int = -1


class BlockTables:
    """The tables of the sequences that run."""

    def __init__(self, rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        """
        Args:
            rows: sequences that a step has at most.
            max_blocks: of a sequence.
            block_size: tokens per block.
            device: where the kernels read them.
        """
        self.block_size = block_size
        self.rows = rows
        self.tensor = torch.zeros(2 * rows, HEADER + max_blocks, dtype=torch.int32, device=device)
        """``[2 * rows, HEADER + blocks]``: the first row in the packed tokens, the start in the sequence, tokens,
        blocks. Behind the sequences' rows are those of padding, one for each token of a step that may be padding: it
        sees nothing. It all stays where it is."""
        nobody = torch.tensor([[token, -1, 1] for token in range(rows)], dtype=torch.int32)
        self.tensor[rows:, :HEADER] = nobody.to(device)
        self._host = np.zeros((rows, max_blocks), np.int64)
        self._rows: dict[int, _Row] = {}
        """By the identity of the sequence's blocks, the one that was used last at the end."""

    def place(self, spans: Sequence[Span]) -> StepPlaces:
        """Return where a step's tokens lie; what it says is changed must be (``update``) before the next call."""
        if not spans:
            empty = np.zeros(0, np.int64)
            return StepPlaces(*(empty,) * 6)
        width = self.tensor.shape[1]
        fresh = [(self._row(span.blocks), span) for span in spans]
        rows, first, start, counts = np.array(
            [(row.number, span.first, span.start, span.count) for row, span in fresh], np.int64
        ).T
        changed, values = list[int](), list[int]()
        for row, span in fresh:
            for begin, blocks in self._news(row, span.blocks):
                self._host[row.number, begin : begin + len(blocks)] = blocks
                place = row.number * width + HEADER + begin
                changed.extend(range(place, place + len(blocks)))
                values.extend(blocks)
        owner = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(owner)) + (start - first)[owner]
        blocks = self._host[rows[owner], positions // self.block_size]
        slots = blocks * self.block_size + positions % self.block_size
        heads = (rows[:, None] * width + np.arange(HEADER)).reshape(-1)
        header = np.stack((first, start, counts), axis=1).reshape(-1)
        return StepPlaces(
            rows, counts, positions, slots, np.concatenate((heads, np.array(changed, np.int64))),
            np.concatenate((header, np.array(values, np.int64))),
        )  # fmt: skip

    def update(self, changed: Tensor, values: Tensor) -> None:
        """Change the tables on the device; ``changed`` and ``values``: int64, there."""
        self.tensor.view(-1).index_copy_(0, changed, values.int())

    def forget(self) -> None:
        """Send whole tables next time: it is not known what the device has."""
        self._rows.clear()

    def _row(self, blocks: Sequence[int]) -> _Row:
        row = self._rows.pop(id(blocks), None)
        if row is None:
            free = len(self._rows) < len(self._host)
            number = len(self._rows) if free else self._rows.pop(next(iter(self._rows))).number
            row = _Row(number, blocks)
        self._rows[id(blocks)] = row
        return row

    def _news(self, row: _Row, blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Yield what the device does not have of a row: from which place on, and the blocks."""
        replaced = blocks.replaced if isinstance(blocks, Blocks) else -1
        known = row.sent if replaced >= 0 and replaced == row.replaced else 0
        row.sent, row.replaced = len(blocks), replaced
        if known < len(blocks):
            yield known, blocks[known:]
