"""The KV cache in FP8: half the memory of bfloat16.

Attention reads what is stored, for the tokens of the step too, so that a token sees the same keys and values whether
its prompt was computed at once, in chunks, or found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.engine.attention.paged import KvTensors
from inflight.engine.models.config import ModelConfig
from inflight.engine.quant.formats import to_e4m3


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
