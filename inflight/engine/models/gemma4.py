"""Gemma 4: layers with a scale of their own, experts beside the feed-forward, and embeddings for each layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.models.config import ExpertsConfig, ModelConfig
from inflight.engine.models.decoder import Backbone, DecoderLayer, DecoderModel
from inflight.engine.models.experts import MoeBlock, route
from inflight.engine.models.layers import Activation, Attend, GatedMlp, UnitNorm, norm_of
from inflight.engine.models.rope import Positions


class ExpertsBeside(MoeBlock):
    """Experts that take what the layer's feed-forward takes, before its norm."""

    def __init__(self, model: ModelConfig, config: ExpertsConfig) -> None:
        super().__init__(model, config)
        self.router_norm = UnitNorm(model.rms_norm_eps)
        self.scale = nn.Parameter(torch.empty(model.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))
        self.input_norm, self.output_norm, self.mlp_norm = (norm_of(model) for _ in range(3))
        self._root = model.hidden_size**-0.5

    def forward(self, x: Tensor, of_mlp: Tensor | None = None) -> Tensor:
        """Return ``[tokens, hidden]``: what the experts make of ``x`` and, each normalized, ``of_mlp`` in one."""
        assert of_mlp is not None
        scores = self.gate(self.router_norm(x) * self.scale * self._root)
        chosen, weights = route(scores, self.config, None)
        weights = weights * self.per_expert_scale.float()[chosen]
        return self.mlp_norm(of_mlp) + self.output_norm(self.mix(self.input_norm(x), chosen, weights))


class Gemma4Layer(DecoderLayer):
    """A layer of Gemma 4."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert config.gemma4 is not None
        one, size = config.layers[layer], config.gemma4.per_layer_size
        self.moe = ExpertsBeside(config, one.experts) if one.experts else None
        self.layer_scalar = nn.Parameter(torch.empty(1))
        if size:
            self.activation = Activation(config.activation != "silu")
            self.per_layer_input_gate = nn.Linear(config.hidden_size, size, bias=False)
            self.per_layer_projection = nn.Linear(size, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = norm_of(config)

    def make_mlp(self, config: ModelConfig, layer: int) -> GatedMlp:
        """Return the feed-forward, which is there whether there are experts or not."""
        size = config.layers[layer].intermediate_size
        return GatedMlp(config.hidden_size, size, config.mlp_bias, Activation(config.activation != "silu"))

    def forward(self, x: Tensor, positions: Positions, attend: Attend, own: Tensor | None = None) -> Tensor:
        """Return ``[tokens, hidden]``; ``own``: the tokens' embeddings for this layer ``[tokens, per_layer_size]``."""
        x = x + self.attention_output_norm(self.self_attn(self.attention_norm(x), positions, attend))
        made = self.mlp(self.mlp_norm(x))
        x = x + self.mlp_output_norm(made if self.moe is None else self.moe(x, made))
        if own is not None:
            gated = self.activation(torch.cat((self.per_layer_input_gate(x), own), dim=-1))
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class Gemma4Model(DecoderModel):
    """Gemma 4, text."""

    layer_type = Gemma4Layer

    def make_backbone(self, config: ModelConfig) -> Backbone:
        """Return embeddings, layers and last norm."""
        backbone, extra = super().make_backbone(config), config.gemma4
        assert extra is not None
        if extra.per_layer_size:
            width = config.num_layers * extra.per_layer_size
            table = torch.empty(extra.per_layer_vocab, width)
            backbone.embed_tokens_per_layer = nn.Embedding.from_pretrained(table)
            backbone.per_layer_model_projection = nn.Linear(config.hidden_size, width, bias=False)
            backbone.per_layer_projection_norm = norm_of(config, extra.per_layer_size)
        return backbone

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""
        x = self.embed(token_ids)
        own = self._per_layer(token_ids, x)
        for index, position in enumerate(self.positions(positions, x.dtype)):
            x = self.model.layers[index](x, position, attend, None if own is None else own[:, index])
        return self.model.norm(x)

    def _per_layer(self, token_ids: Tensor, embedded: Tensor) -> Tensor | None:
        """Return the tokens' embeddings for each layer ``[tokens, layers, per_layer_size]``; None: there are none."""
        extra, backbone = self.config.gemma4, self.model
        if extra is None or not extra.per_layer_size:
            return None
        scale = torch.tensor(extra.per_layer_size**0.5, dtype=embedded.dtype).item()
        looked_up = (backbone.embed_tokens_per_layer(token_ids) * scale).unflatten(-1, (-1, extra.per_layer_size))
        projected = backbone.per_layer_model_projection(embedded) * self.config.hidden_size**-0.5
        projected = backbone.per_layer_projection_norm(projected.unflatten(-1, (-1, extra.per_layer_size)))
        return (projected + looked_up) * 2.0**-0.5
