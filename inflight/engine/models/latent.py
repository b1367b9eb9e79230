"""Multi-head latent attention: the keys and values of all heads are made from one vector of a token, which is stored.

The matrix that makes keys of the latent vector is multiplied with the queries instead, and the one that makes values
with what is attended to. So attention has one head of keys, whose beginning is the value, for all heads of queries; the
cache holds a fraction of what the heads' own keys and values would take.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.models.config import LatentConfig, ModelConfig
from inflight.engine.models.layers import Attend, AttentionOptions, RmsNorm
from inflight.engine.models.rope import Positions, rotate


class LatentAttention(nn.Module):
    """Attention of a layer whose keys and values are latent."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config = model.attention[layer]
        assert config.latent is not None
        self.layer, self.config, self.latent, hidden = layer, config, config.latent, model.hidden_size
        latent, bias, heads = config.latent, config.qkv_bias, config.num_heads
        query_rows = heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(hidden, query_rows, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=bias)
            self.q_a_layernorm = RmsNorm(latent.query_rank, latent.eps)
            self.q_b_proj = nn.Linear(latent.query_rank, query_rows, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.rank + latent.rope_dim, bias=bias)
        self.kv_a_layernorm = RmsNorm(latent.rank, latent.eps)
        self.kv_b_proj = nn.Linear(latent.rank, heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * latent.value_dim, hidden, bias=config.output_bias)

    @property
    def options(self) -> AttentionOptions:
        """How this layer attends."""
        return AttentionOptions(self.config.scale)

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return self.kv_a_layernorm.weight.dtype

    def forward(self, x: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        latent, count = self.latent, len(x)
        assert positions.rotation is not None
        query = self._queries(x).view(count, -1, latent.nope_dim + latent.rope_dim)
        plain, rotated = query.split((latent.nope_dim, latent.rope_dim), dim=-1)
        vector, key = self.kv_a_proj_with_mqa(x).split((latent.rank, latent.rope_dim), dim=-1)
        vector = self.kv_a_layernorm(vector)[:, None]
        rotated = rotate(rotated, *positions.rotation, self.config.interleaved)
        key = rotate(key[:, None], *positions.rotation, self.config.interleaved)
        query = torch.cat((per_head(plain, self.kv_b_proj, latent, 0), rotated), dim=-1)
        if positions.query_scale is not None:
            query = (query * positions.query_scale).to(x.dtype)
        key = torch.cat((vector, key), dim=-1)
        attended = attend(self.layer, query, key, key[..., : latent.rank], self.options)
        return self.o_proj(per_head(attended, self.kv_b_proj, latent, 1).reshape(count, -1))

    def _queries(self, x: Tensor) -> Tensor:
        if self.latent.query_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


class LatentProducts(nn.Module):
    """What ``per_head`` takes in place of ``kv_b_proj``: its products, head by head."""

    def __init__(self, absorb: list[nn.Module], expand: list[nn.Module]) -> None:
        super().__init__()
        self.products = nn.ModuleList([nn.ModuleList(absorb), nn.ModuleList(expand)])


def per_head(x: Tensor, linear: nn.Module, latent: LatentConfig, which: int) -> Tensor:
    """Multiply each head by its own part of ``kv_b_proj``.

    Args:
        x: with ``which`` 0 the queries ``[tokens, heads, nope_dim]``, with 1 what is attended to
            ``[tokens, heads, rank]``.
        linear: ``kv_b_proj``, or the ``LatentProducts`` that it was packed as.
        latent: of the layer.
        which: 0: by what makes keys, transposed; 1: by what makes values.

    Returns:
        ``[tokens, heads, rank]`` or ``[tokens, heads, value_dim]``.
    """
    if isinstance(linear, LatentProducts):
        return torch.stack([product(x[:, head]) for head, product in enumerate(linear.products[which])], dim=1)
    parts = head_weights(linear, latent, x.dtype)[which]
    return torch.einsum("thi,hoi->tho", x, parts)


def head_weights(linear: nn.Module, latent: LatentConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the matrices of each head: ``[heads, rank, nope_dim]`` and ``[heads, value_dim, rank]``."""
    weight = linear.weight if isinstance(linear, nn.Linear) else linear.decode(dtype)
    keys, values = weight.view(-1, latent.nope_dim + latent.value_dim, latent.rank).split(
        (latent.nope_dim, latent.value_dim), dim=1
    )
    return keys.transpose(1, 2), values
