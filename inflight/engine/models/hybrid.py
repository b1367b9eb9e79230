"""Hybrids: some layers have attention, and the others a recurrent state in its place."""

from __future__ import annotations

from torch import Tensor

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderLayer, DecoderModel
from inflight.engine.models.gated_delta_net import GatedDeltaNet, Recur
from inflight.engine.models.layers import Attend
from inflight.engine.models.rope import Positions


class HybridLayer(DecoderLayer):
    """A layer with attention, or with a Gated DeltaNet in its place."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self._is_recurrent = config.layers[layer].recurrent is not None
        if self._is_recurrent:
            self.linear_attn = GatedDeltaNet(config, layer)

    def forward(self, x: Tensor, positions: Positions, attend: Attend, recur: Recur | None = None) -> Tensor:
        """Return ``[tokens, hidden]``; ``recur`` must be given if the layer is recurrent."""
        if not self._is_recurrent:
            return super().forward(x, positions, attend)
        assert recur is not None
        x = x + self.attention_output_norm(self.linear_attn(self.attention_norm(x), recur))
        return x + self.mlp_output_norm(self.mlp(self.mlp_norm(x)))


class HybridModel(DecoderModel):
    """A model of such layers."""

    layer_type = HybridLayer

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, recur: Recur | None = None) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""
        x = self.embed(token_ids)
        for layer, position in zip(self.model.layers, self.positions(positions, x.dtype), strict=True):
            x = layer(x, position, attend, recur)
        return self.model.norm(x)
