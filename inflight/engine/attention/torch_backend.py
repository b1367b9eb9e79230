"""Attention over the paged KV cache in plain PyTorch, for any device: the reference for ``triton_backend``.

Each longer chunk of a prompt is attended alone. Single queries, as in decoding and in the verification of drafts, are
attended all at once, and so are short chunks where that costs no copies: a row is one token's query, with the slots of
the keys that it attends to. There are two ways to compute the same for rows: ``SparseDecodeAttention`` reads keys and
values where they lie; ``GatherDecodeAttention`` copies them into rows first, and serves every type and device.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.layers import AttentionOptions

_LANES = 16
"""Rows are padded to a multiple of it, so that a row's sums are the same whatever the longest row is."""
_SHORT_LENGTH = 64
"""Shorter rows count as rows of this length: below it a bucket of their own costs more than padding."""
_MAX_ROW_CHUNK = 16
"""Chunks of no more tokens are attended row by row, where rows cost no copies."""
_MAX_BUCKET_SLOTS = 2**17
"""Slots that all rows of a bucket may attend to, since each slot takes memory for each head."""
_MAX_SCORES = 2**24
"""Scores of a chunk that are in memory at once, where PyTorch has no attention with soft caps and sinks."""
_MAX_KEPT_SLOTS = 2**20
"""Slots of all rows up to which sparsity patterns are kept from layer to layer: 8 bytes for each slot and head."""


@dataclass(frozen=True)
class QueryRange:
    """The tokens of one sequence in a step: they are adjacent in the packed batch, and each is a query of attention."""

    first: int
    """Index of the first of them in the packed batch."""
    start: int
    """Position of the first of them in the sequence."""
    count: int
    """How many they are."""
    blocks: Sequence[int]
    """The sequence's blocks, enough for all tokens up to the last of these; there may be more."""
    paths: Sequence[Sequence[int]] = ()
    """Where the last tokens are a tree of drafts: of each one, the indices in the tree of its ancestors and its own."""

    @property
    def stop(self) -> int:
        """Index in the packed batch behind the last token."""
        return self.first + self.count

    @property
    def length(self) -> int:
        """Tokens of the sequence up to the last of these."""
        return self.start + self.count

    @property
    def trunk(self) -> int:
        """Tokens of the sequence before the tree."""
        return self.length - len(self.paths)


class TorchAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``.

    Tokens of short chunks are attended together, each as a row of its own; each longer chunk is attended alone.
    """

    def __init__(self, pool: KvPool, ranges: Sequence[QueryRange], block_size: int) -> None:
        """``ranges``: of the step, in the order of the packed tokens."""
        self._pool = pool
        device, has_trees = pool.device, any(query_range.paths for query_range in ranges)
        table = _slots(ranges, block_size)
        counts, offsets = torch.tensor([(one.count, one.start - one.first) for one in ranges]).unbind(1)
        owner = torch.arange(len(ranges)).repeat_interleave(counts)
        indices = offsets[owner] + torch.arange(len(owner))  # of each token in its sequence
        positions, tree_slots = _trees(table, owner, indices, ranges) if has_trees else (indices, None)
        lengths = positions + 1
        self.positions = positions.to(device)
        """Positions of the step's tokens in their sequences ``[tokens]``."""
        self._new_slots = table[owner, indices].to(device)
        self._count = len(owner)
        # Gathering copies all keys for each row, so longer chunks are attended alone. In place, a row's sums are the
        # same bits in any chunk: an exact pool takes rows only, and does without the float64 of chunks.
        max_row_chunk = 1 if not pool.in_place else math.inf if pool.exact else _MAX_ROW_CHUNK
        alone = [one.count > max_row_chunk and not one.paths for one in ranges]
        rows = (~torch.tensor(alone))[owner].nonzero()[:, 0]
        keep = int(lengths[rows].sum()) <= _MAX_KEPT_SLOTS
        self._rows: list[tuple[Tensor, DecodeAttention]] = []
        for tokens in _buckets(rows, lengths):
            slots = table[owner[tokens]] if tree_slots is None else tree_slots[tokens]
            seen = SlotWindow(slots.to(device), lengths[tokens].to(device))
            attend = SparseDecodeAttention(pool, seen, keep) if pool.in_place else GatherDecodeAttention(pool, seen)
            self._rows.append((tokens.to(device), attend))
        self._chunks = [
            _ChunkAttention(pool, one, table[index, : one.length].to(device))
            for index, one in enumerate(ranges)
            if alone[index]
        ]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor | None, value: Tensor | None, options: AttentionOptions
    ) -> Tensor:
        """Store keys and values, and attend. Tokens behind those of the ranges are padding: nothing attends to them."""
        count = self._count
        if key is not None and value is not None:
            self._pool.write(layer, self._new_slots, key[:count], value[:count])
        if len(self._rows) == 1 and not self._chunks:
            out = self._rows[0][1](layer, query[:count], options)
            return functional.pad(out, (0, 0, 0, 0, 0, len(query) - count)) if len(query) > count else out
        out = query.new_zeros(*query.shape[:2], self._pool.layers[layer].values.shape[-1])
        for tokens, attend in self._rows:
            out[tokens] = attend(layer, query[tokens], options)
        for chunk in self._chunks:
            part = slice(chunk.range.first, chunk.range.stop)
            own = None if key is None or value is None else (key[part], value[part])
            out[part] = chunk(layer, query[part], own, options)
        return out


class _ChunkAttention:
    """Attention of several tokens of one sequence."""

    def __init__(self, pool: KvPool, query_range: QueryRange, slots: Tensor) -> None:
        """``slots``: of the sequence up to the range's last token ``[length]``."""
        self._pool, self.range, self._slots = pool, query_range, slots
        self._biases: dict[tuple[int | None, int | None], Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, own: tuple[Tensor, Tensor] | None, options: AttentionOptions
    ) -> Tensor:
        """Return ``[count, heads, size of a value]``; ``own``: the chunk's keys and values, where the layer has any."""
        pool, count, start = self._pool, self.range.count, self.range.start
        if start == 0 and pool.stored == pool.dtype and own is not None:
            keys, values = (part.transpose(0, 1) for part in own)  # the pool would return the same
        else:
            keys, values = pool.read(layer, self._slots)
        reach = min(options.window or count, options.chunk or count)
        causal = start == 0 and count <= reach
        plain = options.softcap is None and options.sinks is None
        kind = (
            torch.float64 if pool.exact else query.dtype if plain else torch.promote_types(query.dtype, torch.float32)
        )
        kv_heads, group = len(keys), query.shape[1] // len(keys)
        shared = (kv_heads, group, -1, -1)
        grouped = query.view(count, kv_heads, group, -1).permute(1, 2, 0, 3).to(kind)
        keys, values = (part[:, None].expand(shared).to(kind) for part in (keys, values))
        if plain:
            bias = None if causal else self._bias(options, kind)
            out = functional.scaled_dot_product_attention(
                grouped, keys, values, attn_mask=bias, is_causal=causal, scale=options.scale
            )
        else:
            out = self._attend_in_parts(grouped, keys, values, options)
        return out.to(query.dtype).permute(2, 0, 1, 3).flatten(1, 2)

    def _attend_in_parts(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Attend with soft caps and sinks; all are ``[kv_heads, group, count or length, head_dim]``."""
        sinks = None if options.sinks is None else options.sinks.view(*query.shape[:2], 1, 1)
        bias = self._bias(options, query.dtype)
        rows = max(1, _MAX_SCORES // (query.shape[0] * query.shape[1] * keys.shape[2]))
        parts = []
        for part, own in zip(query.split(rows, 2), bias.split(rows), strict=True):
            scores = part @ keys.transpose(-1, -2) * options.scale
            parts.append(_weights(scores, own, options.softcap, sinks) @ values)
        return torch.cat(parts, 2)

    def _bias(self, options: AttentionOptions, kind: torch.dtype) -> Tensor:
        """Return the mask that is added to the scores ``[count, length]``; made once for all layers.

        It is 0 where a query attends to a key, and minus infinity elsewhere.
        """
        reach = (options.window, options.chunk)
        if reach not in self._biases:
            positions = torch.arange(len(self._slots), device=self._slots.device)
            own = positions[self.range.start :, None]
            hidden = positions > own
            if options.window is not None:
                hidden |= positions <= own - options.window
            if options.chunk is not None:
                hidden |= positions < own // options.chunk * options.chunk
            bias = torch.zeros(hidden.shape, dtype=kind, device=hidden.device)
            self._biases[reach] = bias.masked_fill_(hidden, -torch.inf)
        return self._biases[reach]


def _weights(scores: Tensor, bias: Tensor | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Return the weights of keys ``[..., length]``.

    Args:
        scores: of the same shape.
        bias: what is added to them, after the soft cap; None: nothing.
        softcap, sinks: those of ``AttentionOptions``; sinks are of a shape that ``[..., 1]`` can be made of.
    """
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    # As many columns as lanes, so that a row's sums are the same whatever the longest row is.
    columns = scores.new_full((*scores.shape[:-1], _LANES), -math.inf)
    columns[..., :1] = sinks
    return torch.cat((scores, columns), -1).softmax(-1)[..., : scores.shape[-1]]


def _buckets(rows: Tensor, lengths: Tensor) -> Iterator[Tensor]:
    """Yield the ``rows`` that are attended together; ``lengths``: of all tokens."""
    for bucket in length_buckets(lengths[rows]) if len(rows) else ():
        tokens = rows[bucket]
        yield from tokens.split(max(1, _MAX_BUCKET_SLOTS // int(lengths[tokens].max())))


def _slots(ranges: Sequence[QueryRange], block_size: int) -> Tensor:
    """Return the slots of each range's sequence in a row ``[ranges, slots of the longest]``."""
    needed = [query_range.blocks[: -(-query_range.length // block_size)] for query_range in ranges]
    longest = max(map(len, needed))
    blocks = torch.tensor([[*own, *[0] * (longest - len(own))] for own in needed])
    return (blocks[:, :, None] * block_size + torch.arange(block_size)).flatten(1)


def _trees(table: Tensor, owner: Tensor, indices: Tensor, ranges: Sequence[QueryRange]) -> tuple[Tensor, Tensor]:
    """Return where the packed tokens of a step with trees are, and what they attend to.

    ``table``: the slots of each range's sequence in a row; ``owner``, ``indices``: the row and place of each token.

    Returns:
        Positions ``[tokens]``: in a tree, that of a token is its depth. Then the slots that each token attends to
        ``[tokens, slots]``, in the order of their positions: a token of a tree attends to the trunk and its own path.
    """
    positions, rows = indices.clone(), table[owner]
    for index, query_range in enumerate(ranges):
        first, trunk = query_range.stop - len(query_range.paths), query_range.trunk
        for token, path in enumerate(query_range.paths, first):
            positions[token] = trunk + len(path) - 1
            rows[token, trunk : trunk + len(path)] = table[index, trunk + torch.tensor(path)]
    return positions, rows


class SlotWindow:
    """The slots that each row attends to through an attention window; computed once for all layers."""

    def __init__(self, slots: Tensor, lengths: Tensor) -> None:
        """``slots``: of each row's sequence ``[rows, at least the longest length]``.

        ``lengths``: how many of them each row may attend to ``[rows]``; the last is the row's own token.
        """
        self._slots, self._lengths = slots, lengths
        self._masks: dict[tuple[int | None, int | None], tuple[Tensor, Tensor | None]] = {}

    def __call__(self, options: AttentionOptions) -> tuple[Tensor, Tensor | None]:
        """Return the slots within a layer's window and chunk, padded to one length.

        Returns:
            The slots ``[rows, length]``; a shorter row is padded with its own last slot. Then what is added to the
            scores ``[rows, length]``: 0, or minus infinity at padding; None: there is no padding.
        """
        reach = (options.window, options.chunk)
        if reach in self._masks:
            return self._masks[reach]
        lengths = self._lengths
        counts = lengths if options.window is None else lengths.clamp(max=options.window)
        if options.chunk is not None:
            counts = torch.minimum(counts, (lengths - 1) % options.chunk + 1)
        width = -(-int(counts.max()) // _LANES) * _LANES
        positions = torch.arange(width, device=lengths.device) + (lengths - counts)[:, None]
        slots = self._slots.gather(1, positions.clamp(max=lengths[:, None] - 1))
        padding = positions >= lengths[:, None]
        bias = None
        if padding.any():
            bias = torch.zeros(padding.shape, device=slots.device).masked_fill_(padding, -math.inf)
        self._masks[reach] = slots, bias
        return slots, bias


class SparseDecodeAttention:
    """Reads keys and values where they lie: in float32 on a CPU, whatever type the model computes in.

    The scores are a product of two matrices, queries and all keys of the cache, of which only the entries that are
    needed are computed (``torch.sparse.sampled_addmm``); the outputs are weighted sums of the cache's values
    (``embedding_bag``). A row's output does not depend on other rows, to the last bit.
    """

    def __init__(self, pool: KvPool, window_slots: SlotWindow, keep: bool = True) -> None:
        """``keep``: whether to keep the sparsity pattern from one layer to the next."""
        self._pool, self._window_slots, self._keep = pool, window_slots, keep
        self._patterns: dict[tuple[int, int, int | None, int | None], tuple[Tensor, Tensor | None]] = {}
        _accept_sparse_tensors()

    def __call__(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Return ``[rows, heads, size of a value]`` of a query ``[rows, heads, head_dim]``."""
        rows, heads, dim = query.shape
        stored = self._pool.layers[layer]
        entries, bias = self._pattern(heads, len(stored.keys), options)
        keys, values = stored.flat
        if stored.is_latent:
            values = keys  # `embedding_bag` would copy a part of their columns
        torch.sparse.sampled_addmm(
            entries, query.reshape(-1, dim).float(), keys.t(), beta=0.0, alpha=options.scale, out=entries
        )
        scores = entries.values().view(rows, heads, -1)
        sinks = None if options.sinks is None else options.sinks.float()[:, None]
        weights = _weights(scores, None if bias is None else bias[:, None], options.softcap, sinks)
        starts = entries.crow_indices()[:-1]
        out = functional.embedding_bag(
            entries.col_indices(), values, starts, mode="sum", per_sample_weights=weights.reshape(-1)
        )
        return out.view(rows, heads, -1)[..., : stored.values.shape[-1]].to(query.dtype)

    def _pattern(self, heads: int, kv_heads: int, options: AttentionOptions) -> tuple[Tensor, Tensor | None]:
        """Return the product of queries and keys ``[rows * heads, kv_heads * slots]`` in compressed rows, and the bias.

        It has the entries that are needed; ``SlotWindow`` says what the bias is.
        """
        kept = (heads, kv_heads, options.window, options.chunk)
        if kept in self._patterns:
            return self._patterns[kept]
        (seen, bias), slots = self._window_slots(options), self._pool.slots
        rows, length = seen.shape
        kind = torch.int32 if max(kv_heads * slots, rows * heads * length) < 2**31 else torch.int64
        first = torch.arange(kv_heads, dtype=kind).repeat_interleave(heads // kv_heads) * slots
        columns = (seen.to(kind)[:, None] + first[:, None]).view(-1)
        bounds = torch.arange(0, len(columns) + 1, length, dtype=kind)
        entries = torch.sparse_csr_tensor(
            bounds, columns, torch.zeros(len(columns)), (rows * heads, kv_heads * slots), check_invariants=False
        )
        if self._keep:
            self._patterns[kept] = entries, bias
        return entries, bias


class GatherDecodeAttention:
    """Copies each row's keys and values together and attends to the copies: for any type and device."""

    def __init__(self, pool: KvPool, window_slots: SlotWindow) -> None:
        self._pool, self._window_slots = pool, window_slots

    def __call__(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Return ``[rows, heads, size of a value]`` of a query ``[rows, heads, head_dim]``."""
        slots, bias = self._window_slots(options)
        keys, values = self._pool.read(layer, slots)
        plain = options.softcap is None and options.sinks is None
        kind = query.dtype if plain and not self._pool.exact else torch.float64
        # Heads that share keys and values are like further queries of one head.
        grouped = query.unflatten(1, (len(keys), -1)).transpose(0, 1).to(kind)
        keys, values = keys.to(kind), values.to(kind)
        bias = None if bias is None else bias[None, :, None].to(kind)
        if plain:
            out = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=options.scale)
        else:
            sinks = None if options.sinks is None else options.sinks.view(len(keys), 1, -1, 1)
            scores = grouped @ keys.transpose(-1, -2) * options.scale
            out = _weights(scores, bias, options.softcap, sinks) @ values
        return out.to(query.dtype).transpose(0, 1).flatten(1, 2)


DecodeAttention = SparseDecodeAttention | GatherDecodeAttention


def length_buckets(lengths: Tensor) -> list[Tensor]:
    """Return the rows ``[n]`` in buckets whose lengths differ by a factor of two at most, short ones aside.

    A bucket is padded to its longest row: no more than half of it is padding.
    """
    if 2 * max(int(lengths.min()), _SHORT_LENGTH) >= int(lengths.max()):
        return [torch.arange(len(lengths))]
    descending, order = lengths.sort(descending=True, stable=True)
    longest, buckets, first = descending.tolist(), [], 0
    for index, length in enumerate(longest):
        if 2 * max(length, _SHORT_LENGTH) < longest[first]:
            buckets.append(order[first:index].sort().values)
            first = index
    return [*buckets, order[first:].sort().values]


@functools.cache
def _accept_sparse_tensors() -> None:
    """Provoke PyTorch's warning that compressed rows are in beta, which it gives only once, and suppress it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([]), (1, 1))
