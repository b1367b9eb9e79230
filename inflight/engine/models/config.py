"""ModelConfig: the shape and constants of a decoder-only transformer, layer by layer; ``reading`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

QkNorm = Literal["none", "head", "width", "unit"]
"""How queries and keys are normalized. head: each head, by one weight; width: all heads of a token as one vector; unit:
each head, without a weight."""
Norms = Literal["before", "around", "behind"]
"""Where a layer normalizes: in front of attention and feed-forward, in front of and behind both, or only behind."""
NormKind = Literal["plain", "wide", "offset"]
"""What norms do with their weight. plain: what is normalized is rounded and then multiplied by it; wide: multiplied,
and then rounded; offset: as wide, by one more than it."""
Routing = Literal["softmax", "chosen_softmax", "sigmoid", "input_sigmoid"]
"""How experts get their weights. softmax: over all experts, then the largest are chosen; chosen_softmax: the largest
are chosen, then over those; sigmoid: of each expert, a bias helps to choose; input_sigmoid: the same without a bias,
and the expert's input is multiplied."""

STATE_CHUNK = 64
"""Tokens of a prompt that a recurrent layer takes at once. Chunks lie at multiples of it, however a prompt is cut."""


@dataclass(frozen=True)
class QueryScaling:
    """Queries grow with their position: by ``1 + beta * log(1 + floor((position + offset) / length))``."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share one latent vector of a token."""

    rank: int
    """Size of the latent vector, from which keys and values are made."""
    query_rank: int | None
    """Size of the vector that queries are made from; None: they are made from the hidden state."""
    nope_dim: int
    """Dimensions of a query and key that are not rotated."""
    rope_dim: int
    """Dimensions that are, which the keys of all heads share."""
    value_dim: int
    """Of a head's value."""
    eps: float
    """Of the norms of both vectors."""


@dataclass(frozen=True)
class AttentionConfig:
    """Attention of one layer: grouped-query attention, or with ``latent`` latent attention."""

    num_heads: int
    num_kv_heads: int
    """Of what is stored; with ``latent`` one."""
    head_dim: int
    """Of a stored key; with ``latent`` it has the latent vector, then the rotated dimensions."""
    scale: float
    """Of the scores."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = "none"
    window: int | None = None
    """How many tokens back attention reaches, itself included; None: all."""
    chunk: int | None = None
    """Attention stays within chunks of so many positions; None: there are none."""
    rope: Mapping[str, Any] | None = None
    """The parameters of the rotary embedding, by transformers' names; None: queries and keys are not rotated."""
    interleaved: bool = False
    """Whether each rotated pair of dimensions is adjacent; else they lie half of the rotated dimensions apart."""
    query_scaling: QueryScaling | None = None
    softcap: float | None = None
    """Scores are squeezed between plus and minus this, by its multiple of a hyperbolic tangent; None: they are not."""
    sinks: bool = False
    """Whether each head has a further score, learned, that takes a share of attention and gives nothing."""
    output_gate: bool = False
    """Whether what each head gives is multiplied by a gate, which the projection of queries gives beside them."""
    latent: LatentConfig | None = None
    unit_values: bool = False
    """Whether values are normalized, each head, without a weight."""
    values_are_keys: bool = False
    """Values are what keys are before norm and rotation."""
    kv_donor: int | None = None
    """The layer whose keys and values this one attends to, and it has none of its own; None: it has."""

    @property
    def value_dim(self) -> int:
        """Of a stored value; with ``latent`` it is the beginning of the stored key, and takes no memory."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Of what ``rope`` is the embedding of."""
        return self.latent.rope_dim if self.latent else self.head_dim


@dataclass(frozen=True)
class GatedDeltaNetConfig:
    """Gated DeltaNet of one layer, in place of attention (arXiv:2412.06464): a short convolution and a matrix state."""

    key_heads: int
    """Of queries and keys; each serves ``value_heads / key_heads`` adjacent heads of values."""
    value_heads: int
    key_dim: int
    """Of a head."""
    value_dim: int
    taps: int
    """Tokens that the convolution of a token takes, its own included."""
    interleaved: bool = False
    """Whether in the checkpoint the rows of the input projection lie by heads of keys, all kinds of a head together."""

    @property
    def channels(self) -> int:
        """What the convolution takes of a token: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Of the state of the convolution: the inputs of the tokens before."""
        return self.channels, self.taps - 1

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Of the matrix state."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True)
class ExpertsConfig:
    """A Mixture of Experts, in place of one layer's feed-forward."""

    num_experts: int
    per_token: int
    """How many experts a token has."""
    intermediate_size: int
    """Of an expert."""
    routing: Routing
    normalized: bool
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Of the weights."""
    groups: int = 1
    """Experts are in so many groups, of which the best ``groups_per_token`` take part."""
    groups_per_token: int = 1
    group_best: int = 2
    """How many of a group's best experts are added up to say how good it is."""
    bias: bool = False
    """Whether experts and router have biases."""
    shared_size: int = 0
    """Intermediate size of the feed-forward that all tokens take besides; 0: there is none."""
    shared_gate: bool = False
    """Whether what it gives is multiplied by a gate, which depends on the token."""
    clamp: float | None = None
    """The activation is that of gpt-oss, whose inputs are clamped to this; None: it is the model's."""
    clamped_slope: float = 1.702
    """Of the sigmoid in gpt-oss' activation."""


@dataclass(frozen=True)
class LayerConfig:
    """One layer."""

    attention: AttentionConfig | None
    """None: the layer is recurrent."""
    intermediate_size: int
    """Of the feed-forward, where there are no experts."""
    experts: ExpertsConfig | None = None
    recurrent: GatedDeltaNetConfig | None = None
    """What the layer has in place of attention."""


@dataclass(frozen=True)
class Gemma4Config:
    """What Gemma 4 has besides: each layer's result is multiplied by a number; experts are beside the feed-forward."""

    per_layer_size: int
    """Size of the embedding that a token has for each layer; 0: there is none."""
    per_layer_vocab: int


@dataclass(frozen=True)
class Matrix:
    """A matrix of a model whose layers only transformers knows, as the dry run finds it."""

    name: str
    """Of its module, or of the parameter that has the matrices of several experts."""
    inputs: int
    outputs: int
    bias: bool
    share: float = 1.0
    """The share of the tokens that it multiplies: an expert multiplies those that are routed to it."""


@dataclass(frozen=True)
class OutlinedWeights:
    """The weights of a model whose layers only transformers knows."""

    matrices: tuple[Matrix, ...]
    """All but the embedding and the head."""
    embedding: int
    """The number of parameters of all embeddings, those of positions included."""
    head: int
    """That of the head; 0 where it is the embedding."""
    others: int
    """That of norms, routers, and what else is neither a matrix nor its bias."""


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    mlp_bias: bool
    dtype: str
    """Of the weights in the checkpoint."""
    is_text_part: bool = False
    """Whether the checkpoint has parts for images or sound besides, which are not served."""
    norms: Norms = "before"
    norm_kind: NormKind = "plain"
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """As ``AttentionConfig.softcap``, of the logits."""
    gemma4: Gemma4Config | None = None
    """What Gemma 4 has besides."""
    modeling: Literal["native", "transformers"] = "native"
    """Whose code computes it. With transformers' only what the KV cache and attention need is known of layers."""
    outlined: OutlinedWeights | None = None
    """Its weights, where transformers' code computes it."""
    published_as: str = ""
    """The first name in ``architectures`` of the checkpoint's ``config.json``."""
    is_base: bool = False
    """Whether it is published as a backbone (``Qwen3Model``), whose files need not have a head."""
    has_head: bool = True
    """Whether it has logits; a backbone alone gives embeddings."""

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def attention(self) -> dict[int, AttentionConfig]:
        """The attention of each layer that has some, by the index of the layer."""
        return {index: layer.attention for index, layer in enumerate(self.layers) if layer.attention is not None}

    @property
    def recurrent(self) -> dict[int, GatedDeltaNetConfig]:
        """What each layer without attention has, by the index of the layer."""
        return {index: layer.recurrent for index, layer in enumerate(self.layers) if layer.recurrent is not None}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """``AttentionConfig.window`` of each layer with attention."""
        return tuple(one.window for one in self.attention.values())

    @property
    def num_heads(self) -> int:
        """Of each layer. Raises ValueError: they differ, or have none; so do the properties below."""
        return int(self._common("num_heads"))

    @property
    def num_kv_heads(self) -> int:
        """Of each layer."""
        return int(self._common("num_kv_heads"))

    @property
    def head_dim(self) -> int:
        """Of each layer."""
        return int(self._common("head_dim"))

    @property
    def attention_scale(self) -> float:
        """Of each layer."""
        return float(self._common("scale"))

    @property
    def intermediate_size(self) -> int:
        """Of each layer, where none has experts."""
        sizes = {layer.intermediate_size for layer in self.layers if layer.experts is None}
        if len(sizes) != 1 or any(layer.experts is not None for layer in self.layers):
            raise ValueError(f"{self.architecture}: layers differ in intermediate_size, or have experts")
        return sizes.pop()

    def _common(self, name: str) -> Any:
        values = {getattr(one, name) for one in self.attention.values()}
        if len(values) != 1 or self.recurrent:
            raise ValueError(f"{self.architecture}: layers differ in {name}")
        return values.pop()
