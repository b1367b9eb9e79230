"""Attention over the paged KV cache: plain PyTorch, for any device.

Keys and values lie in slots; a block is ``block_size`` slots in a row. Tokens that decode attend together, padded to
the longest; each chunk of a prefill attends alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from inflight.engine.kv_cache import BlockCopy
from inflight.engine.models.config import ModelConfig


class KvTensors:
    """The cache's memory: keys and values ``[layers, slots, kv_heads, head_dim]``."""

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
            exact: attention over them is to add up in float64 (see ``quant.linears``).
        """
        self.exact = exact
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self._block_size = block_size

    @property
    def nbytes(self) -> int:
        """Memory of all keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``."""
        self.keys[layer][slots], self.values[layer][slots] = key, value

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[..., kv_heads, head_dim]`` of ``slots [...]``."""
        return self.keys[layer][slots], self.values[layer][slots]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks; all sources are read before anything is written."""
        if not copies:
            return
        sources, targets = (
            self._slots_of([getattr(copy, side) for copy in copies]).reshape(-1) for side in ("source", "target")
        )
        for tensor in (self.keys, self.values):
            tensor[:, targets] = tensor[:, sources]

    def _slots_of(self, blocks: list[int]) -> Tensor:
        first = torch.tensor(blocks, device=self.keys.device)[:, None] * self._block_size
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
    """The sequence's blocks, enough for all tokens up to the chunk's last."""


class PagedAttention:
    """One step's attention, for all layers. Called by the model; see ``layers.Attend``."""

    def __init__(self, tensors: KvTensors, spans: Sequence[Span], block_size: int) -> None:
        self._tensors = tensors
        device = tensors.keys.device
        width = torch.arange(block_size)
        slots = [
            (torch.tensor(span.blocks)[:, None] * block_size + width).reshape(-1)[: span.start + span.count]
            for span in spans
        ]
        self._new_slots = torch.cat([own[span.start :] for own, span in zip(slots, spans, strict=True)]).to(device)
        decodes = [(own, span) for own, span in zip(slots, spans, strict=True) if span.count == 1]
        self._prefills = [(own.to(device), span) for own, span in zip(slots, spans, strict=True) if span.count > 1]
        self._rows = torch.tensor([span.first for _, span in decodes], device=device)
        if decodes:
            lengths = torch.tensor([len(own) for own, _ in decodes])
            padded = torch.nn.utils.rnn.pad_sequence([own for own, _ in decodes], batch_first=True)
            # The mask hides padding, but not what is no number: each row is padded with a slot of its own.
            last = torch.minimum(torch.arange(padded.shape[1]), lengths[:, None] - 1)
            self._slots = padded.gather(1, last).to(device)
            self._lengths = lengths.to(device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Store keys and values, and attend."""
        self._tensors.write(layer, self._new_slots, key, value)
        seen, exact = torch.empty_like(query), self._tensors.exact
        if len(self._rows):
            stored = self._tensors.read(layer, self._slots)
            seen[self._rows] = _attend(query[self._rows][:, None], *stored, self._mask(-1, window), scale, exact)[:, 0]
        for index, (slots, span) in enumerate(self._prefills):
            part = slice(span.first, span.first + span.count)
            stored = self._tensors.read(layer, slots[None])
            seen[part] = _attend(query[part][None], *stored, self._mask(index, window), scale, exact)[0]
        return seen

    def _mask(self, index: int, window: int | None) -> Tensor:
        """Return what each token of prefill ``index`` (-1: of the decodes) may see; made once for all layers."""
        mask = self._masks.get((index, window))
        if mask is None:
            if index < 0:
                own = self._lengths[:, None, None] - 1
                length = self._slots.shape[1]
            else:
                slots, span = self._prefills[index]
                length = len(slots)
                own = torch.arange(span.start, length, device=slots.device)[None, :, None]
            positions = torch.arange(length, device=own.device)
            mask = positions <= own
            if window is not None:
                mask &= positions > own - window
            self._masks[index, window] = mask
        return mask


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, exact: bool) -> Tensor:
    """Grouped-query attention.

    The heads of a group share keys and values, so they are laid in a row as if they were further queries.

    Args:
        query: ``[batch, queries, heads, head_dim]``.
        keys: ``[batch, length, kv_heads, head_dim]``.
        values: like ``keys``.
        mask: ``[batch, queries, length]``, True where a query may look.
        scale: of the scores.
        exact: add up in float64.

    Returns:
        Like ``query``.
    """
    dtype = torch.float64 if exact else query.dtype
    batch, queries, heads, dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    grouped = query.view(batch, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    seen = functional.scaled_dot_product_attention(
        grouped.reshape(batch, kv_heads, group * queries, dim).to(dtype),
        keys.transpose(1, 2).to(dtype),
        values.transpose(1, 2).to(dtype),
        attn_mask=mask.repeat(1, group, 1)[:, None],
        scale=scale,
    )
    seen = seen.to(query.dtype).view(batch, kv_heads, group, queries, dim)
    return seen.permute(0, 3, 1, 2, 4).reshape(batch, queries, heads, dim)
