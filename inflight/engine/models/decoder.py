"""The decoder-only transformer: one model for Llama, Mistral, Qwen2, Qwen3 and Phi-3, and one for Gemma 3.

A new architecture with layers like these is only a row of ``config.ARCHITECTURES``. One with other layers needs a layer
beside ``DecoderLayer``, a subclass of ``DecoderModel`` and its choice in ``make_model``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.models.config import ARCHITECTURES, ModelConfig
from inflight.engine.models.layers import Attend, Attention, GatedMlp, GemmaRmsNorm, RmsNorm, RotaryEmbedding, Rotation


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, RmsNorm)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class GemmaDecoderLayer(nn.Module):
    """Gemma 3's layer: a norm before and behind both attention and feed-forward."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRmsNorm(size, eps)
        self.self_attn = Attention(config, layer, GemmaRmsNorm)
        self.post_attention_layernorm = GemmaRmsNorm(size, eps)
        self.pre_feedforward_layernorm = GemmaRmsNorm(size, eps)
        self.mlp = GatedMlp(config)
        self.post_feedforward_layernorm = GemmaRmsNorm(size, eps)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, attend))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Backbone(nn.Module):
    """Embedding, layers and last norm. The names are those of checkpoints, where this is ``model``."""

    def __init__(self, config: ModelConfig, layer: type[nn.Module], norm: type[RmsNorm]) -> None:
        super().__init__()
        # nn.Embedding(...) would draw random numbers, which on the meta device first loads PyTorch's compiler.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_layers))
        self.norm = norm(config.hidden_size, config.rms_norm_eps)


class DecoderModel(nn.Module):
    """A language model; subclasses say what differs between architectures."""

    layer_type: type[nn.Module] = DecoderLayer
    norm_type: type[RmsNorm] = RmsNorm

    def __init__(self, config: ModelConfig, served_length: int) -> None:
        """``served_length``: the longest sequence that will be served."""
        super().__init__()
        self.config = config
        with torch.device("meta"):  # the checkpoint brings the weights
            self.model = Backbone(config, self.layer_type, self.norm_type)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        distinct = list({tuple(sorted(map(repr, rope.items()))): rope for rope in config.ropes}.values())
        self.rope_of_layer = [distinct.index(rope) for rope in config.ropes]
        """Per layer, which of ``ropes`` it has."""
        self.ropes = [
            RotaryEmbedding(rope, config.head_dim, config.max_position_embeddings, served_length) for rope in distinct
        ]

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""
        x = self.embed(token_ids)
        rotations = [rope(positions, x.dtype) for rope in self.ropes]
        for layer, rope in zip(self.model.layers, self.rope_of_layer, strict=True):
            x = layer(x, rotations[rope], attend)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]``."""
        return self.lm_head(hidden).float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self.model.embed_tokens(token_ids)


class Gemma3Model(DecoderModel):
    """Gemma 3, text."""

    layer_type = GemmaDecoderLayer
    norm_type = GemmaRmsNorm

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings scaled by the root of their size, rounded to their type as in training."""
        x = self.model.embed_tokens(token_ids)
        return x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype).item()


def make_model(config: ModelConfig, served_length: int) -> DecoderModel:
    """Return the model for ``config.architecture``, without weights."""
    kind = Gemma3Model if ARCHITECTURES[config.architecture].is_gemma else DecoderModel
    return kind(config, served_length)
