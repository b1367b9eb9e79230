"""Layers that the architectures share. Activations are packed: ``[tokens, ...]``, all sequences of a step in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.rope import rotate

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the step's positions."""


class Attend(Protocol):
    """Stores the step's keys and values in the cache and attends over what each token may see."""

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """Return ``[tokens, heads, head_dim]``.

        Args:
            layer: index of the layer.
            query: ``[tokens, heads, head_dim]``.
            key: ``[tokens, kv_heads, head_dim]``.
            value: like ``key``.
            window: how many tokens back attention reaches, itself included; None: all.
            scale: of the scores.
        """


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if x.dtype == self.weight.dtype == torch.float32:
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return self.weight * self._normalized(x).to(x.dtype)

    def gain(self) -> Tensor:
        """Return what each normalized value is multiplied by, float32."""
        return self.weight.float()

    def _normalized(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps)


class GemmaRmsNorm(RmsNorm):
    """Gemma's: the weight is an offset from one, applied before the result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return (self._normalized(x) * self.gain()).to(x.dtype)

    def gain(self) -> Tensor:
        """Return what each normalized value is multiplied by, float32."""
        return 1.0 + self.weight.float()


class GatedMlp(nn.Module):
    """The gated feed-forward layer; gate and up projection are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.gelu = config.activation == "gelu_pytorch_tanh"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self.down_proj(gated(self.gate_up_proj(x), self.gelu))


def gated(x: Tensor, gelu: bool) -> Tensor:
    """Return the activation of the first half of ``x [tokens, 2 * inner]`` times the second."""
    gate, up = x.chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)).mul_(up)


@dataclass(frozen=True)
class AttentionShape:
    """What there is to know of a layer's attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    """How many tokens back it reaches, itself included; None: all."""
    scale: float
    """Of the scores."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; query, key and value projection are one matrix."""

    def __init__(self, config: ModelConfig, layer: int, norm: type[RmsNorm]) -> None:
        super().__init__()
        self.shape = AttentionShape(
            layer, config.num_heads, config.num_kv_heads, config.head_dim, config.windows[layer], config.attention_scale
        )
        width = config.num_heads * config.head_dim
        rows = width + 2 * config.num_kv_heads * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, rows, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = norm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        shape = self.shape
        heads = self.qkv_proj(x).view(len(x), -1, shape.head_dim)
        query, key, value = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        query = rotate(self.q_norm(query), *rotation)
        key = rotate(self.k_norm(key), *rotation)
        seen = attend(shape.layer, query, key, value, shape.window, shape.scale)
        return self.o_proj(seen.reshape(len(x), -1))
