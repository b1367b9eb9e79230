"""The tensors of the paged KV cache: keys and values of all layers. A slot is one token's place in them.

A block is ``block_size`` slots in a row. The model runner owns the tensors; ``manager`` decides who has which block.
FP8 and INT8, with scales, take half the memory of bfloat16. Attention reads what is stored, for the tokens of the step
too, so that a token attends to the same keys and values whether its prompt was computed at once, in chunks, or cached.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant.formats import to_e4m3, to_int8
from inflight.engine.transfer import to_device


@dataclass(frozen=True)
class StoredKv:
    """One layer's keys and values as they are stored: ``[kv_heads, slots, head_dim]``, both with the same strides."""

    keys: Tensor
    values: Tensor
    """In latent attention the beginning of the keys; then nothing is stored for them."""
    key_scales: Tensor
    """What stored keys are multiples of ``[kv_heads, slots]``, any strides; those of INT8 are stored with them."""
    value_scales: Tensor

    @property
    def is_latent(self) -> bool:
        """Whether values are the beginning of the keys."""
        return self.values.data_ptr() == self.keys.data_ptr()

    @functools.cached_property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Keys and values, the slots of all heads in one dimension ``[kv_heads * slots, head_dim]``."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)


class KvPool:
    """Keys and values of all layers: those of a head lie in a row, block by block.

    Layers with heads of one number and size lie in one tensor, ``[layers, kv_heads, slots, head_dim]``.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        stored: torch.dtype | None = None, exact: bool = False,
    ) -> None:  # fmt: skip
        """``dtype``: the type of the computation, which ``read`` returns; ``stored``: that of keys and values here.

        ``exact``: whether sums over them may not depend on how a step is composed (see ``quant.linears``).
        """
        self.dtype, self.exact, self.device, self.block_size = dtype, exact, device, block_size
        self.stored, self.slots = stored or dtype, num_blocks * block_size
        """The type of what is stored, and how many slots there are."""
        self.parts: list[Tensor] = []
        """All that is stored, each ``[layers, kv_heads, slots, ...]``: keys, values, and the scales of single slots."""
        attention = config.attention
        shapes = {
            layer: (one.num_kv_heads, one.head_dim, one.value_dim)
            for layer, one in attention.items()
            if one.kv_donor is None
        }
        made: dict[int, StoredKv] = {}
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer, other in shapes.items() if other == shape]
            made |= zip(layers, self._make(layers, *shape), strict=True)
        self.layers = {layer: made[layer if one.kv_donor is None else one.kv_donor] for layer, one in attention.items()}
        """What each layer with attention has stored, or the one whose keys and values it attends to, by its index."""

    def _make(self, layers: list[int], kv_heads: int, head_dim: int, value_dim: int) -> list[StoredKv]:
        """Allocate what some layers store, whose heads are of one number and size."""
        shape = (len(layers), kv_heads, self.slots, head_dim)
        keys = torch.zeros(shape, dtype=self.stored, device=self.device)
        values = keys[..., :value_dim] if value_dim < head_dim else torch.zeros_like(keys)
        self.parts += [keys] if value_dim < head_dim else [keys, values]
        scales = self._make_scales(layers, shape[:-1], is_latent=value_dim < head_dim)
        return [StoredKv(*parts) for parts in zip(keys, values, *scales, strict=True)]

    def _make_scales(
        self, layers: list[int], shape: tuple[int, ...], is_latent: bool
    ) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """Return what stored keys and values are multiples of: of each of ``layers``, ``shape[1:]``."""
        one = torch.ones(1, device=self.device).expand(shape)
        return one, one

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(part.nbytes for part in self.parts)

    @property
    def in_place(self) -> bool:
        """Whether attention can read keys and values without copies, at no loss (``SparseDecodeAttention``)."""
        float32 = self.stored == torch.float32 and self.dtype in (torch.float32, torch.bfloat16)
        return float32 and self.device.type == "cpu"

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``[tokens, kv_heads, head_dim]`` at ``slots [tokens]``, rounded to the nearest."""
        one = self.layers[layer]
        one.keys[:, slots] = key.transpose(0, 1).to(self.stored)
        if not one.is_latent:
            one.values[:, slots] = value.transpose(0, 1).to(self.stored)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[kv_heads, ..., their size]`` of ``slots [...]``, in the type of the computation."""
        one = self.layers[layer]
        keys, values = one.keys[:, slots], one.values[:, slots]
        if self.stored.itemsize == 1:
            key_scales, value_scales = (scale[:, slots][..., None] for scale in (one.key_scales, one.value_scales))
            keys, values = keys.float() * key_scales, values.float() * value_scales
        return keys.to(self.dtype), values.to(self.dtype)

    def copy(self, copies: abc.Sequence[BlockCopy]) -> None:
        """Copy whole blocks; all sources are read before anything is written."""
        if copies:
            slots = np.array(copies)[..., None] * self.block_size + np.arange(self.block_size)
            self.move(*slots.swapaxes(0, 1).reshape(2, -1))

    def move(self, sources: abc.Sequence[int] | np.ndarray, targets: abc.Sequence[int] | np.ndarray) -> None:
        """Copy slots; all sources are read before anything is written."""
        there, here = (to_device(np.array(slots), self.device) for slots in (targets, sources))
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

    def named(self, layers: Iterable[int]) -> dict[str, Tensor]:
        """Return each scale of these layers, a view, by its name in checkpoints."""
        return {
            f"model.layers.{layer}.self_attn.{name}": scales[layer]
            for name, scales in (("k_proj.k_scale", self.keys), ("v_proj.v_scale", self.values))
            for layer in layers
        }


class Fp8KvPool(KvPool):
    """Keys and values as E4M3, with a scale for each layer's keys and one for its values."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device,
        scales: KvScales,
    ) -> None:  # fmt: skip
        """Arguments are those of ``KvPool``; ``scales``: what stored keys and values are multiples of."""
        self.layer_scales = scales
        super().__init__(config, num_blocks, block_size, dtype, device, torch.float8_e4m3fn, exact=True)

    def _make_scales(
        self, layers: list[int], shape: tuple[int, ...], is_latent: bool
    ) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        scales = self.layer_scales
        # Views, so that a scale that changes later is seen.
        of_keys, of_values = (
            [of_layers[layer].expand(shape[1:]) for layer in layers] for of_layers in (scales.keys, scales.values)
        )
        return of_keys, of_keys if is_latent else of_values

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store, rounded to the nearest and saturating."""
        keys, values = self.layer_scales.keys[layer], self.layer_scales.values[layer]
        super().write(layer, slots, to_e4m3(key, keys), to_e4m3(value, values))


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

    def _make_scales(
        self, layers: list[int], shape: tuple[int, ...], is_latent: bool
    ) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        made = torch.zeros((1 if is_latent else 2, *shape), dtype=torch.bfloat16, device=self.device)
        self.parts += [scales[..., None] for scales in made]
        return made[0], made[-1]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        (keys, key_scales), (values, value_scales) = to_int8(key), to_int8(value)
        super().write(layer, slots, keys, values)
        one = self.layers[layer]
        one.key_scales[:, slots] = key_scales[..., 0].t()
        if not one.is_latent:
            one.value_scales[:, slots] = value_scales[..., 0].t()
