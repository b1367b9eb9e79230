"""The KV cache in another type than the computation's: FP8 and INT8 take half the memory of bfloat16.

Attention reads what is stored, for the tokens of the step too, so that a token sees the same keys and values whether
its prompt was computed at once, in chunks, or found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.engine.attention.paged import KvTensors
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant.formats import to_e4m3, to_int8


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


class Fp8KvTensors(KvTensors):
    """Keys and values as E4M3, a scale for each layer's keys and one for its values."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KvScales,
    ) -> None:
        """
        Args:
            config: of the model.
            num_blocks: capacity.
            block_size: tokens per block.
            dtype: of the computation; what ``read`` returns.
            device: where the tensors lie.
            scales: what stored values are multiples of.
        """
        super().__init__(config, num_blocks, block_size, torch.float8_e4m3fn, device, exact=True)
        self._dtype, self._scales = dtype, scales

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """What stored keys and values are multiples of ``[layers, kv_heads, slots]``: a layer's share one."""
        shape, own = self.keys.shape[:-1], self._scales
        return own.keys[:, None, None].expand(shape), own.values[:, None, None].expand(shape)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store, rounded to the nearest and saturating."""
        scales = self._scales
        super().write(layer, slots, to_e4m3(key, scales.keys[layer]), to_e4m3(value, scales.values[layer]))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``slots`` in the type of the computation."""
        keys, values = super().read(layer, slots)
        scales = self._scales
        return (
            (keys.float() * scales.keys[layer]).to(self._dtype),
            (values.float() * scales.values[layer]).to(self._dtype),
        )


class Int8KvTensors(KvTensors):
    """Keys and values as INT8, with a bfloat16 scale for each token and head, found when the token is stored.

    A scale for a whole layer would have to cover the few channels of keys that are far larger than the others, in any
    text (KIVI, arXiv:2402.02750), and needs calibration: INT8 has no exponent to absorb it. A scale for each token and
    head knows the largest value exactly, depends on nothing but the token, and takes two bytes beside ``head_dim``.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Arguments are those of ``Fp8KvTensors``, but for the scales: they are found."""
        super().__init__(config, num_blocks, block_size, torch.int8, device, exact=True)
        self._dtype = dtype
        shape = (*self.keys.shape[:-1], 1)
        self._key_scales, self._value_scales = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in "kv")

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Keys and values, and the scales of each."""
        return self.keys, self.values, self._key_scales, self._value_scales

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """What stored keys and values are multiples of ``[layers, kv_heads, slots]``."""
        return self._key_scales[..., 0], self._value_scales[..., 0]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store, rounded to the nearest."""
        (keys, key_scales), (values, value_scales) = to_int8(key), to_int8(value)
        super().write(layer, slots, keys, values)
        self._key_scales[layer][:, slots] = key_scales.transpose(0, 1)
        self._value_scales[layer][:, slots] = value_scales.transpose(0, 1)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``slots`` in the type of the computation."""
        keys, values = super().read(layer, slots)
        key_scales, value_scales = (scales[layer][:, slots] for scales in (self._key_scales, self._value_scales))
        return (keys.float() * key_scales).to(self._dtype), (values.float() * value_scales).to(self._dtype)


class ConvertedKvTensors(KvTensors):
    """Keys and values in a floating-point type that is not the computation's."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        stored: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        exact: bool,
    ) -> None:
        """Arguments are those of ``Fp8KvTensors``, with these in place of the scales.

        Args:
            stored: the type of what is stored.
            exact: sums over them may not depend on how a step is made up (see ``linears``).
        """
        super().__init__(config, num_blocks, block_size, stored, device, exact)
        self._dtype = dtype

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store, rounded to the nearest where the type is smaller."""
        super().write(layer, slots, key.to(self.keys.dtype), value.to(self.keys.dtype))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of ``slots`` in the type of the computation."""
        keys, values = super().read(layer, slots)
        return keys.to(self._dtype), values.to(self._dtype)


def resolve_kv_dtype(wanted: str, calibrated: bool, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which keys and values are stored.

    Args:
        wanted: ``kv_cache.dtype`` of the deployment.
        calibrated: the checkpoint is meant for an FP8 cache.
        dtype: of the computation.
    """
    if wanted == "auto":
        return torch.float8_e4m3fn if calibrated else dtype
    return torch.float8_e4m3fn if wanted == "fp8" else getattr(torch, wanted)  # type: ignore[no-any-return]
