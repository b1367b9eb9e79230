"""Attention of single tokens, all of them at once: what decoding does, and the checking of drafts.

Each row is one token's query with the slots that it may look at. Two ways to compute the same: ``SampledRows`` reads
keys and values where they lie, ``GatheredRows`` copies them into a row first, for whatever the other does not serve.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from inflight.engine.attention.paged import KvTensors

_LANES = 16
"""Rows are padded to a multiple of it, so that a row's sums are the same whatever the longest row is."""
_ALIKE = 64
"""Shorter rows count as being so long: below, a group of their own costs more than padding."""


class Rows(Protocol):
    """The tokens of a step that are attended together."""

    def __call__(self, layer: int, query: Tensor, window: int | None, scale: float) -> Tensor:
        """Return ``[rows, heads, head_dim]`` of a query of that shape."""


@dataclass(frozen=True)
class Seen:
    """What each row looks at."""

    slots: Tensor
    """``[rows, length]``; where a row is shorter it is padded with its own last slot."""
    bias: Tensor | None
    """0 where a row looks, minus infinity where it is padded ``[rows, length]``; None: nothing is padded."""


class Reach:
    """Which slots each row sees, by window; made once for all layers."""

    def __init__(self, slots: Tensor, lengths: Tensor) -> None:
        """
        Args:
            slots: of each row's sequence ``[rows, at least the longest length]``.
            lengths: how many of them each row sees ``[rows]``: its own is the last.
        """
        self._slots, self._lengths = slots, lengths
        self._seen: dict[int | None, Seen] = {}

    def __call__(self, window: int | None) -> Seen:
        """Return what is seen through a window of so many tokens; None: all."""
        seen = self._seen.get(window)
        if seen is None:
            seen = self._seen[window] = self._look(window)
        return seen

    def _look(self, window: int | None) -> Seen:
        lengths = self._lengths
        counts = lengths if window is None else lengths.clamp(max=window)
        width = -(-int(counts.max()) // _LANES) * _LANES
        positions = torch.arange(width, device=lengths.device) + (lengths - counts)[:, None]
        slots = self._slots.gather(1, positions.clamp(max=lengths[:, None] - 1))
        padding = positions >= lengths[:, None]
        if not padding.any():
            return Seen(slots, None)
        return Seen(slots, torch.zeros(padding.shape, device=slots.device).masked_fill_(padding, -math.inf))


class SampledRows:
    """Reads keys and values where they lie: in float32 on a CPU, whatever type the model computes in.

    The scores are a product of two matrices, queries and all keys of the cache, of which only the entries that are
    needed are computed (``torch.sparse.sampled_addmm``); the outputs are weighted sums of the cache's values
    (``embedding_bag``). What a row yields does not depend on other rows, to the last bit.
    """

    def __init__(self, tensors: KvTensors, reach: Reach, keep: bool = True) -> None:
        """
        Args:
            tensors: the cache's memory.
            reach: which slots each row sees.
            keep: whether to keep, for the next layer, where what it reads lies.
        """
        self._tensors, self._reach, self._keep = tensors, reach, keep
        self._patterns: dict[tuple[int, int | None], _Pattern] = {}
        _accept_sparse_tensors()

    def __call__(self, layer: int, query: Tensor, window: int | None, scale: float) -> Tensor:
        """Return ``[rows, heads, head_dim]`` of a query of that shape."""
        rows, heads, dim = query.shape
        pattern = self._pattern(heads, window)
        keys, values = self._tensors.of_heads[layer]
        entries = pattern.entries
        torch.sparse.sampled_addmm(
            entries, query.reshape(-1, dim).float(), keys.t(), beta=0.0, alpha=scale, out=entries
        )
        scores = entries.values().view(rows, heads, -1)
        weights = (scores if pattern.bias is None else scores + pattern.bias).softmax(-1)
        seen = functional.embedding_bag(
            pattern.columns, values, pattern.starts, mode="sum", per_sample_weights=weights.view(-1)
        )
        return seen.view(rows, heads, dim).to(query.dtype)

    def _pattern(self, heads: int, window: int | None) -> _Pattern:
        pattern = self._patterns.get((heads, window))
        if pattern is None:
            kv_heads, slots = self._tensors.keys.shape[1:3]
            pattern = _Pattern.of(self._reach(window), heads, kv_heads, slots)
            if self._keep:
                self._patterns[heads, window] = pattern
        return pattern


@dataclass(frozen=True)
class _Pattern:
    """Which entries of the product are needed."""

    columns: Tensor
    """``[rows * heads * length]``: places in a layer's keys, head after head."""
    starts: Tensor
    """``[rows * heads]``: where each head of each row begins in ``columns``."""
    entries: Tensor
    """The product ``[rows * heads, kv_heads * slots]`` in compressed rows."""
    bias: Tensor | None
    """``[rows, 1, length]``."""

    @classmethod
    def of(cls, seen: Seen, heads: int, kv_heads: int, slots: int) -> _Pattern:
        rows, length = seen.slots.shape
        kind = torch.int32 if max(kv_heads * slots, rows * heads * length) < 2**31 else torch.int64
        first = torch.arange(kv_heads, dtype=kind).repeat_interleave(heads // kv_heads) * slots
        columns = (seen.slots.to(kind)[:, None] + first[:, None]).view(-1)
        bounds = torch.arange(0, len(columns) + 1, length, dtype=kind)
        entries = torch.sparse_csr_tensor(
            bounds, columns, torch.zeros(len(columns)), (rows * heads, kv_heads * slots), check_invariants=False
        )
        return cls(columns, bounds[:-1], entries, None if seen.bias is None else seen.bias[:, None])


class GatheredRows:
    """Copies keys and values into a row and attends to that: for any type and device."""

    def __init__(self, tensors: KvTensors, reach: Reach) -> None:
        self._tensors, self._reach = tensors, reach

    def __call__(self, layer: int, query: Tensor, window: int | None, scale: float) -> Tensor:
        """Return ``[rows, heads, head_dim]`` of a query of that shape."""
        seen = self._reach(window)
        keys, values = self._tensors.read(layer, seen.slots)
        kind = torch.float64 if self._tensors.exact else query.dtype
        # Heads that share keys and values are like further queries of one head.
        out = functional.scaled_dot_product_attention(
            query.unflatten(1, (len(keys), -1)).transpose(0, 1).to(kind),
            keys.to(kind),
            values.to(kind),
            attn_mask=None if seen.bias is None else seen.bias[None, :, None].to(kind),
            scale=scale,
        )
        return out.to(query.dtype).transpose(0, 1).reshape(query.shape)


def alike(lengths: Tensor) -> list[Tensor]:
    """Return the rows ``[n]`` in groups whose lengths differ by a factor of two at most, but for short ones.

    A group is padded to its longest row: no more than half of it is padding.
    """
    if 2 * max(int(lengths.min()), _ALIKE) >= int(lengths.max()):
        return [torch.arange(len(lengths))]
    descending, order = lengths.sort(descending=True, stable=True)
    longest, groups, first = descending.tolist(), [], 0
    for place, length in enumerate(longest):
        if 2 * max(length, _ALIKE) < longest[first]:
            groups.append(order[first:place].sort().values)
            first = place
    return [*groups, order[first:].sort().values]


@functools.cache
def _accept_sparse_tensors() -> None:
    """PyTorch says once that compressed rows are in beta."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))
