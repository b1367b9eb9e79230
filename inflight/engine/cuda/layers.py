"""A loaded model's layers with the kernels in their place; the model itself knows nothing of them.

A layer is nine launches, or ten where keys are split: norm, query-key-value product, rotation and storing, attention
(and its combination), output product, norm, gate-up product, gate, down product. The sum behind each half of a layer is
taken by the norm that follows, so what goes from layer to layer is a ``Residual``. Experts take as many products, in
the second of which the gate is, and besides the router's, the choice, the deal, and the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.attention.store import HeadNorms, Turn, form_of, rotate_and_store
from inflight.engine.attention.triton_backend import TritonAttention
from inflight.engine.cuda.elementwise import FusedRmsNorm, FusedSum, Residual, gate
from inflight.engine.cuda.experts import FusedExperts
from inflight.engine.cuda.fp8 import ScaledMmLinear
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models.decoder import DecoderLayer, DecoderModel
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.layers import Attend, Attention, GatedMlp, RmsNorm
from inflight.engine.models.rope import Positions, RotaryEmbedding, Rotation

_POSITIONS = 8192
"""How many positions' angles are computed at once."""


def fuse_layers(model: DecoderModel, one_tile: bool = False) -> None:
    """Put the kernels into a loaded model, which has the FP8 products already that it is to have (``fp8``).

    ``one_tile``: experts multiply any number of rows alike (``experts.tile_of``).
    """
    model.ropes = [RotaryTable(rope, model.dtype, model.device) for rope in model.ropes]
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FusedLayer(layer, one_tile)
    model.model.norm = FusedRmsNorm(model.model.norm)


class RotaryTable(RotaryEmbedding):
    """Cosines and sines of all positions, computed once: a step's kernels look up those that they need."""

    def __init__(self, rope: RotaryEmbedding, dtype: torch.dtype, device: torch.device) -> None:
        """``rope`` computes them, whatever its scaling, which it settled for the served length."""
        self.dim, self.length = rope.dim, rope.length
        half = rope.dim // 2
        self._table = torch.empty(rope.length, rope.dim, dtype=dtype, device=device)
        """Cosines of a position, then its sines."""
        for positions in torch.arange(rope.length, device=device).split(_POSITIONS):
            cos, sin = rope(positions, dtype)
            self._table[positions, :half], self._table[positions, half:] = cos[:, 0, :half], sin[:, 0, half:]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return what ``rotate_and_store`` takes of positions ``[tokens]``; ``dtype`` is that of the table."""
        return self._table, positions


class FusedLayer(nn.Module):
    """``decoder.DecoderLayer``."""

    def __init__(self, layer: DecoderLayer, one_tile: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._behind_attention, self._behind_mlp = (
            norm.weight if isinstance(norm, RmsNorm) else None
            for norm in (layer.attention_output_norm, layer.mlp_output_norm)
        )
        scales = _input_scale(attention.qkv_proj), _scale_of_mlp(mlp)
        self.attention_norm = _in_front(layer.attention_norm, layer.attention_output_norm, scales[0])
        self.attention = FusedAttention(attention)
        self.mlp_norm = _in_front(layer.mlp_norm, layer.mlp_output_norm, scales[1])
        self.mlp = _fused_experts(mlp, one_tile) if isinstance(mlp, MoeBlock) else FusedMlp(mlp)

    def forward(self, x: Tensor | Residual, positions: Positions, attend: Attend) -> Residual:
        """Return the residual and what is to be added to it."""
        normal = self.attention_norm(x)
        sum_before = x.x if isinstance(x, Residual) else x
        x = Residual(sum_before, self.attention(normal, positions, attend), self._behind_attention)
        return Residual(x.x, self.mlp(self.mlp_norm(x)), self._behind_mlp)


def _in_front(norm: nn.Module, behind: nn.Module, scale: Tensor | None) -> FusedRmsNorm | FusedSum:
    """Return what computes a norm in front of a half of a layer, or the sum where there is a norm behind it alone."""
    if isinstance(norm, RmsNorm):
        return FusedRmsNorm(norm, scale)
    assert isinstance(behind, RmsNorm)
    return FusedSum(behind, scale)


def _scale_of_mlp(mlp: GatedMlp | MoeBlock) -> Tensor | None:
    """Return the scale of a feed-forward's input in FP8; None: it does not take FP8."""
    return None if isinstance(mlp, MoeBlock) else _input_scale(mlp.gate_up_proj)


def _fused_experts(block: MoeBlock, one_tile: bool) -> FusedExperts:
    shared = FusedMlp(block.shared_expert) if block.config.shared_size else None
    made = FusedExperts(block, shared, one_tile)
    if made.down.is_cuda:
        torch.cuda.empty_cache()  # what the experts' own weights took, for those of the next layer
    return made


class FusedMlp(nn.Module):
    """``layers.GatedMlp``."""

    def __init__(self, mlp: GatedMlp) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj
        self._gelu, self._scale = mlp.activation.gelu, _input_scale(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self.down_proj(gate(self.gate_up_proj(x), self._gelu, self._scale))


class FusedAttention(nn.Module):
    """``layers.Attention``."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self._plain = attention
        query, key = attention.q_norm, attention.k_norm
        self._norms = HeadNorms()
        if isinstance(query, RmsNorm):
            as_one = attention.config.qk_norm == "width"
            self._norms = HeadNorms(query.weight, key.weight, query.eps, form_of(query), as_one)

    def forward(self, x: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        plain, turn = self._plain, Turn(positions.rotation, self._plain.config.interleaved, positions.query_scale)
        heads = plain.qkv_proj(x).view(len(x), -1, plain.head_dim)
        if isinstance(attend, TritonAttention):
            slots, stored = attend.target(plain.layer)
            query = rotate_and_store(heads, turn, slots, stored, self._norms)
            out = attend.attend(plain.layer, query, plain.options)
        else:  # another attention stores keys and values itself
            key, value = heads.new_empty(2, plain.kv_heads, len(x), plain.head_dim)
            ones = torch.ones((), device=x.device).expand(key.shape[:2])
            slots = torch.arange(len(x), dtype=torch.int32, device=x.device)
            query = rotate_and_store(heads, turn, slots, StoredKv(key, value, ones, ones), self._norms)
            parts = (query, key.transpose(0, 1), value.transpose(0, 1))
            out = attend(plain.layer, *parts, plain.options)
        return plain.o_proj(out.reshape(len(x), -1))


def _input_scale(linear: nn.Module) -> Tensor | None:
    """Return the scale of a linear's input in FP8; None: it does not take FP8."""
    return linear.input_scale if isinstance(linear, ScaledMmLinear) else None
