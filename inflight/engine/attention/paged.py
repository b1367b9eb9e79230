"""Attention over the paged KV cache: plain PyTorch, for any device.

Keys and values lie in slots; a block is ``block_size`` slots in a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from inflight.engine.attention.rows import GatheredRows, Reach, Rows, SampledRows, alike
from inflight.engine.kv_cache import BlockCopy
from inflight.engine.models.config import ModelConfig
from inflight.engine.transfer import to_device

_LONGEST_ROWS = 16
"""Chunks of no more tokens are attended as rows, where rows cost no copies."""
_MOST_SEEN = 2**17
"""Slots that a group of rows sees in all: what is computed for each of them and each head takes memory at once."""
_MOST_KEPT = 2**20
"""Slots that all rows see of which it is kept from layer to layer where they lie: 8 bytes for each and each head."""


class KvTensors:
    """The cache's memory: keys and values ``[layers, kv_heads, slots, head_dim]``.

    What one head reads lies in a row, block by block.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool = False,
    ) -> None:
        """
        Args:
            config: of the model.
            num_blocks: capacity.
            block_size: tokens per block.
            dtype: of keys and values.
            device: where they lie.
            exact: sums over them may not depend on how a step is made up (see ``quant.linears``).
        """
        self.exact = exact
        shape = (config.num_layers, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._block_size = block_size

    @property
    def nbytes(self) -> int:
        """Memory of all that is stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """What is stored of the slots ``[layers, kv_heads, slots, ...]``: keys, values, and what reading them needs."""
        return self.keys, self.values

    @functools.cached_property
    def of_heads(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, slots of all heads in a row ``[kv_heads * slots, head_dim]``."""
        return [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(self.keys, self.values, strict=True)]

    @functools.cached_property
    def in_place(self) -> bool:
        """Whether attention can read what is stored where it lies, with nothing lost (``SampledRows``)."""
        read = self.read(0, torch.zeros(0, dtype=torch.int64, device=self.keys.device))[0]
        float32 = self.keys.dtype == torch.float32 and read.dtype in (torch.float32, torch.bfloat16)
        return float32 and self.keys.device.type == "cpu"

    @property
    def is_plain(self) -> bool:
        """Whether what is stored is what is read."""
        return type(self).read is KvTensors.read

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """What stored keys and values are multiples of ``[layers, kv_heads, slots]``, views where slots share one."""
        one = torch.ones(1, device=self.keys.device).expand(self.keys.shape[:-1])
        return one, one

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``."""
        for stored, new in ((self.keys, key), (self.values, value)):
            stored[layer][:, slots] = new.transpose(0, 1)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[kv_heads, ..., head_dim]`` of ``slots [...]``."""
        return self.keys[layer][:, slots], self.values[layer][:, slots]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks; all sources are read before anything is written."""
        if not copies:
            return
        sources, targets = (
            self._slots_of([getattr(copy, side) for copy in copies]).reshape(-1) for side in ("source", "target")
        )
        for part in self.parts:
            part[:, :, targets] = part[:, :, sources]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots; all sources are read before anything is written."""
        there, here = (to_device(np.array(slots), self.keys.device) for slots in (targets, sources))
        for tensor in self.parts:
            tensor[:, :, there] = tensor[:, :, here]

    def _slots_of(self, blocks: list[int]) -> Tensor:
        first = to_device(np.array(blocks), self.keys.device)[:, None] * self._block_size
        return first + torch.arange(self._block_size, device=self.keys.device)


@dataclass(frozen=True)
class Span:
    """One chunk of a sequence within the packed tokens of a step."""

    first: int
    """Of its tokens in the packed batch."""
    start: int
    """Position of its first token in the sequence."""
    count: int
    blocks: Sequence[int]
    """The sequence's blocks, enough for all tokens up to the chunk's last; it may have more."""
    paths: Sequence[Sequence[int]] = ()
    """Where its last tokens are a tree of guesses: of each the places in the tree of what it follows, and its own."""

    @property
    def trunk(self) -> int:
        """Tokens of the sequence before the tree."""
        return self.start + self.count - len(self.paths)


def _positions(spans: Sequence[Span], places: Tensor) -> Tensor:
    """Return the positions in their sequences of a step's packed tokens ``[tokens]``; ``places``: where they lie."""
    positions = places.clone()
    for span in spans:
        if span.paths:
            end = span.first + span.count
            depths = [len(path) for path in span.paths]
            positions[end - len(depths) : end] = torch.tensor(depths) + (span.trunk - 1)
    return positions


class PagedAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``.

    Tokens of short chunks are attended together, each as a row of its own; each longer chunk is attended alone.
    """

    def __init__(self, tensors: KvTensors, spans: Sequence[Span], block_size: int) -> None:
        self._tensors = tensors
        device = tensors.keys.device
        table = _slots(spans, block_size)
        counts, offsets = torch.tensor([(span.count, span.start - span.first) for span in spans]).unbind(1)
        owner = torch.arange(len(spans)).repeat_interleave(counts)
        places = offsets[owner] + torch.arange(len(owner))
        positions = _positions(spans, places) if any(span.paths for span in spans) else places
        lengths = positions + 1
        self.positions = positions.to(device)
        """Of the step's tokens in their sequences ``[tokens]``."""
        self._new_slots = table[owner, places].to(device)
        self._count = len(owner)
        direct = tensors.in_place
        self._rows: list[tuple[Tensor, Rows]] = []
        longest = _longest_rows(tensors, direct)
        alone = [span.count > longest and not span.paths for span in spans]
        rows = (~torch.tensor(alone))[owner].nonzero()[:, 0]
        seen = _slots_of_rows(table, owner, spans) if any(span.paths for span in spans) else None
        keep = int(lengths[rows].sum()) <= _MOST_KEPT
        for tokens in _groups(rows, lengths):
            slots = table[owner[tokens]] if seen is None else seen[tokens]
            reach = Reach(slots.to(device), lengths[tokens].to(device))
            self._rows.append(
                (tokens.to(device), SampledRows(tensors, reach, keep) if direct else GatheredRows(tensors, reach))
            )
        self._chunks = [
            _Chunk(tensors, span, table[index, : span.start + span.count].to(device))
            for index, span in enumerate(spans)
            if alone[index]
        ]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Store keys and values, and attend. Tokens beyond the spans' are padding: nobody sees them."""
        count = self._count
        self._tensors.write(layer, self._new_slots, key[:count], value[:count])
        if len(self._rows) == 1 and not self._chunks:
            seen = self._rows[0][1](layer, query[:count], window, scale)
            return functional.pad(seen, (0, 0, 0, 0, 0, len(query) - count)) if len(query) > count else seen
        seen = torch.zeros_like(query)
        for tokens, rows in self._rows:
            seen[tokens] = rows(layer, query[tokens], window, scale)
        for chunk in self._chunks:
            part = slice(chunk.span.first, chunk.span.first + chunk.span.count)
            seen[part] = chunk(layer, query[part], key[part], value[part], window, scale)
        return seen


class _Chunk:
    """Attention of several tokens of one sequence."""

    def __init__(self, tensors: KvTensors, span: Span, slots: Tensor) -> None:
        """
        Args:
            tensors: the cache's memory.
            span: the tokens.
            slots: of the sequence up to the last of them ``[length]``.
        """
        self._tensors, self.span, self._slots = tensors, span, slots
        self._biases: dict[int | None, Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Return ``[count, heads, head_dim]``."""
        tensors, count = self._tensors, self.span.count
        if self.span.start == 0 and tensors.is_plain:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)  # what would be read
        else:
            keys, values = tensors.read(layer, self._slots)
        causal = self.span.start == 0 and (window is None or count <= window)
        kind = torch.float64 if tensors.exact else query.dtype
        kv_heads, group = len(keys), query.shape[1] // len(keys)
        shared = (kv_heads, group, -1, -1)
        seen = functional.scaled_dot_product_attention(
            query.view(count, kv_heads, group, -1).permute(1, 2, 0, 3).to(kind),
            keys[:, None].expand(shared).to(kind),
            values[:, None].expand(shared).to(kind),
            attn_mask=None if causal else self._bias(window, kind),
            is_causal=causal,
            scale=scale,
        )
        return seen.to(query.dtype).permute(2, 0, 1, 3).flatten(1, 2)

    def _bias(self, window: int | None, kind: torch.dtype) -> Tensor:
        """Return 0 where a token may look, minus infinity elsewhere ``[count, length]``; made once for all layers."""
        bias = self._biases.get(window)
        if bias is None:
            positions = torch.arange(len(self._slots), device=self._slots.device)
            own = positions[self.span.start :, None]
            hidden = positions > own
            if window is not None:
                hidden |= positions <= own - window
            bias = torch.zeros(hidden.shape, dtype=kind, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._biases[window] = bias
        return bias


def _groups(rows: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield the ``rows`` that are attended together; ``lengths``: of all tokens."""
    for group in alike(lengths[rows]) if len(rows) else ():
        tokens = rows[group]
        yield from tokens.split(max(1, _MOST_SEEN // int(lengths[tokens].max())))


def _longest_rows(tensors: KvTensors, direct: bool) -> float:
    """Return how many tokens a chunk may have to be attended as rows."""
    if not direct:
        return 1  # what is gathered is gathered for each row
    # A row's sums are the same bits in any chunk: where sums have to be, rows do without float64.
    return math.inf if tensors.exact else _LONGEST_ROWS


def _slots_of_rows(table: Tensor, owner: Tensor, spans: Sequence[Span]) -> Tensor:
    """Return the slots that each packed token sees, in a row of its own.

    A token of a tree sees the trunk and its own path, in the order of their positions.
    """
    rows = table[owner]
    for index, span in enumerate(spans):
        first, trunk = span.first + span.count - len(span.paths), span.trunk
        for row, path in enumerate(span.paths):
            rows[first + row, trunk : trunk + len(path)] = table[index, trunk + torch.tensor(path)]
    return rows


def _slots(spans: Sequence[Span], block_size: int) -> Tensor:
    """Return the slots of each span's sequence in a row ``[spans, slots of the longest]``."""
    needed = [span.blocks[: -(-(span.start + span.count) // block_size)] for span in spans]
    longest = max(map(len, needed))
    blocks = torch.tensor([[*own, *[0] * (longest - len(own))] for own in needed])
    return (blocks[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
