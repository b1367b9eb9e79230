"""The decoder-only transformer: one model for all architectures, as ``ModelConfig`` describes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inflight.engine.models.config import AttentionConfig, ModelConfig
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.latent import LatentAttention
from inflight.engine.models.layers import Activation, Attend, Attention, FusedLinear, GatedMlp, norm_of
from inflight.engine.models.rope import Positions, RotaryEmbedding, query_scale
from inflight.engine.models.served import ServedModel


class DecoderLayer(nn.Module):
    """Attention and feed-forward, with norms in front of them, behind them, or both."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        one = config.layers[layer]
        in_front, behind = config.norms != "behind", config.norms != "before"
        self.attention_norm = norm_of(config) if in_front else nn.Identity()
        if one.attention is not None:  # else a subclass has something in its place
            self.self_attn = (LatentAttention if one.attention.latent else Attention)(config, layer)
        self.attention_output_norm = norm_of(config) if behind else nn.Identity()
        self.mlp_norm = norm_of(config) if in_front else nn.Identity()
        self.mlp = self.make_mlp(config, layer)
        self.mlp_output_norm = norm_of(config) if behind else nn.Identity()

    def make_mlp(self, config: ModelConfig, layer: int) -> MoeBlock | GatedMlp:
        """Return the feed-forward, or the experts in its place."""
        one = config.layers[layer]
        if one.experts is not None:
            return MoeBlock(config, one.experts)
        activation = Activation(config.activation != "silu")
        return GatedMlp(config.hidden_size, one.intermediate_size, config.mlp_bias, activation)

    def forward(self, x: Tensor, positions: Positions, attend: Attend) -> Tensor:
        """Return ``[tokens, hidden]``."""
        x = x + self.attention_output_norm(self.self_attn(self.attention_norm(x), positions, attend))
        return x + self.mlp_output_norm(self.mlp(self.mlp_norm(x)))


class Backbone(nn.Module):
    """Embedding, layers and last norm. The names are those of checkpoints, where this is ``model``."""

    def __init__(self, config: ModelConfig, layer: type[DecoderLayer]) -> None:
        super().__init__()
        # nn.Embedding(...) would draw random numbers, which on the meta device first loads PyTorch's compiler.
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(layer(config, index) for index in range(config.num_layers))
        self.norm = norm_of(config)


def _kind_of_rope(attention: AttentionConfig | None) -> tuple[str, int] | None:
    """Return what tells one rotary embedding from another; None: there is none."""
    if attention is None or not attention.rope:
        return None
    return repr(sorted(attention.rope.items())), attention.rope_dim


class DecoderModel(ServedModel):
    """A language model whose code is ours."""

    layer_type: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, served_length: int) -> None:
        """``served_length``: the longest sequence that will be served."""
        super().__init__()
        self.config = config
        with torch.device("meta"):  # the checkpoint brings the weights
            self.model = self.make_backbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fused_rows = {name: one.parts for name, one in self.named_modules() if isinstance(one, FusedLinear)}
        """By the name of a fused projection: the names of its parts in the checkpoint, and their rows."""
        kinds = [_kind_of_rope(layer.attention) for layer in config.layers]
        distinct = [kind for kind in dict.fromkeys(kinds) if kind is not None]
        self.rope_of_layer = [None if kind is None else distinct.index(kind) for kind in kinds]
        """Per layer, which of ``ropes`` it has; None: none."""
        rotated = [config.attention[kinds.index(kind)] for kind in distinct]
        self.ropes = [
            RotaryEmbedding(one.rope, one.rope_dim, config.max_position_embeddings, served_length)
            for one in rotated
            if one.rope
        ]
        self._scalings = [layer.attention.query_scaling if layer.attention else None for layer in config.layers]

    def make_backbone(self, config: ModelConfig) -> Backbone:
        """Return embeddings, layers and last norm."""
        return Backbone(config, self.layer_type)

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` of packed ``token_ids [tokens]`` at ``positions [tokens]``."""
        x = self.embed(token_ids)
        for layer, position in zip(self.model.layers, self.positions(positions, x.dtype), strict=True):
            x = layer(x, position, attend)
        return self.model.norm(x)

    def positions(self, positions: Tensor, dtype: torch.dtype) -> list[Positions]:
        """Return what ``positions [tokens]`` do in each layer."""
        rotations = [rope(positions, dtype) for rope in self.ropes]
        scales = {scaling: query_scale(scaling, positions) for scaling in set(self._scalings) if scaling}
        return [
            Positions(None if rope is None else rotations[rope], scales[scaling] if scaling else None)
            for scaling, rope in zip(self._scalings, self.rope_of_layer, strict=True)
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 ``[tokens, vocab]``."""
        logits = self.lm_head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``; Gemma's scale is rounded to the type of embeddings, as in training."""
        x = self.model.embed_tokens(token_ids)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype).item()
