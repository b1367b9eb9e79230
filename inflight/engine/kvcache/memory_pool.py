"""The tensors of the paged KV cache: keys and values of all layers. A slot is one token's place in them.

A block is ``block_size`` slots in a row. The model runner owns the tensors; ``manager`` decides who has which block.
FP8 and INT8, with scales, take half the memory of bfloat16. Attention reads what is stored, for the tokens of the step
too, so that a token attends to the same keys and values whether its prompt was computed at once, in chunks, or cached.
"""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant.formats import to_e4m3, to_int8
from inflight.engine.transfer import to_device


class KvPool:
    """Keys and values ``[layers, kv_heads, slots, head_dim]``: those of a head lie in a row, block by block."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        stored: torch.dtype | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        """``dtype``: the type of the computation, which ``read`` returns; ``stored``: that of keys and values here.

        ``exact``: whether sums over them may not depend on how a step is composed (see ``quant.linears``).
        """
        self.dtype, self.exact, self._block_size = dtype, exact, block_size
        shape = (config.num_layers, config.num_kv_heads, num_blocks * block_size, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=stored or dtype, device=device) for _ in "kv")
        one = torch.ones(1, device=device).expand(shape[:-1])
        self.scales = (one, one)
        """What stored keys and values are multiples of, each ``[layers, kv_heads, slots]``; views if slots share."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored ``[layers, kv_heads, slots, ...]``: keys, values, and the scales of single slots."""
        return self.keys, self.values

    @functools.cached_property
    def flat_layers(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer, the slots of all heads in one dimension ``[kv_heads * slots, head_dim]``."""
        return [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in zip(self.keys, self.values, strict=True)]

    @property
    def in_place(self) -> bool:
        """Whether attention can read keys and values without copies, at no loss (``SparseDecodeAttention``)."""
        float32 = self.keys.dtype == torch.float32 and self.dtype in (torch.float32, torch.bfloat16)
        return float32 and self.keys.device.type == "cpu"

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``, rounded to the nearest."""
        for stored, new in ((self.keys, key), (self.values, value)):
            stored[layer][:, slots] = new.transpose(0, 1).to(stored.dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[kv_heads, ..., head_dim]`` of ``slots [...]``, in the type of the computation."""
        keys, values = self.keys[layer][:, slots], self.values[layer][:, slots]
        if self.keys.dtype.itemsize == 1:
            key_scales, value_scales = (scale[layer][:, slots][..., None] for scale in self.scales)
            keys, values = keys.float() * key_scales, values.float() * value_scales
        return keys.to(self.dtype), values.to(self.dtype)

    def copy(self, copies: abc.Sequence[BlockCopy]) -> None:
        """Copy whole blocks; all sources are read before anything is written."""
        if copies:
            slots = np.array(copies)[..., None] * self._block_size + np.arange(self._block_size)
            self.move(*slots.swapaxes(0, 1).reshape(2, -1))

    def move(self, sources: abc.Sequence[int] | np.ndarray, targets: abc.Sequence[int] | np.ndarray) -> None:
        """Copy slots; all sources are read before anything is written."""
        there, here = (to_device(np.array(slots), self.keys.device) for slots in (targets, sources))
        for part in self.parts:
            part[:, :, there] = part[:, :, here]


@dataclass(frozen=True)
class KvScales:
    """Scales of stored keys and values, float32 ``[layers]`` each."""

    keys: Tensor
    values: Tensor

    @classmethod
    def ones(cls, layers: int, device: torch.device) -> KvScales:
        """Return the scales of a cache that was not calibrated."""
        return cls(torch.ones(layers, device=device), torch.ones(layers, device=device))

    def named(self) -> dict[str, Tensor]:
        """Return each scale, a view, by its name in checkpoints."""
        return {
            f"model.layers.{layer}.self_attn.{name}": scales[layer]
            for name, scales in (("k_proj.k_scale", self.keys), ("v_proj.v_scale", self.values))
            for layer in range(len(scales))
        }


class Fp8KvPool(KvPool):
    """Keys and values as E4M3, with a scale for each layer's keys and one for its values."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: KvScales,
    ) -> None:  # fmt: skip
        """Arguments are those of ``KvPool``; ``scales``: what stored keys and values are multiples of."""
        super().__init__(config, num_blocks, block_size, dtype, device, torch.float8_e4m3fn, exact=True)
        shape = self.keys.shape[:-1]
        self.scales = (scales.keys[:, None, None].expand(shape), scales.values[:, None, None].expand(shape))

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store, rounded to the nearest and saturating."""
        key_scale, value_scale = (scale[layer, 0, 0] for scale in self.scales)
        super().write(layer, slots, to_e4m3(key, key_scale), to_e4m3(value, value_scale))


class Int8KvPool(KvPool):
    """Keys and values as INT8, with a bfloat16 scale for each token and head, found when the token is stored.

    A scale for a whole layer would have to cover the few channels of keys that are far larger than the others, in any
    text (KIVI, arXiv:2402.02750), and needs calibration: INT8 has no exponent to absorb it. A scale for each token and
    head knows the largest value exactly, depends on nothing but the token, and takes two bytes beside ``head_dim``.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Arguments are those of ``KvPool``."""
        super().__init__(config, num_blocks, block_size, dtype, device, torch.int8, exact=True)
        of_keys, of_values = torch.zeros((2, *self.keys.shape[:-1]), dtype=torch.bfloat16, device=device)
        self.scales = (of_keys, of_values)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Keys and values, and the scales of each."""
        return self.keys, self.values, *(scale[..., None] for scale in self.scales)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        (keys, key_scales), (values, value_scales) = to_int8(key), to_int8(value)
        super().write(layer, slots, keys, values)
        for stored, new in zip(self.scales, (key_scales, value_scales), strict=True):
            stored[layer][:, slots] = new[..., 0].t()
