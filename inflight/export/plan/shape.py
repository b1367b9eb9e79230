"""What a model's shape alone says: its linear layers, its parameters, and the bytes of its weights.

Everything here follows from ``config.json``; no weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError
from inflight.export.plan.precision import Precision


@dataclass(frozen=True)
class Linear:
    """One linear layer, by its name in checkpoints."""

    name: str
    layer: int
    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        """Number of weights, without the bias."""
        return self.inputs * self.outputs

    def bytes(self, precision: Precision) -> int:
        """Return the bytes of weights, scales and bias."""
        size = self.weights * precision.weight + self.bias * self.outputs * precision.base
        if precision.quantized:
            groups = self.outputs * -(-self.inputs // precision.group) if precision.group else 0
            size += groups * precision.group_scale + self.outputs * precision.channel_scale
            size += self.inputs * precision.input_scale + precision.tensor_scale
        return int(size)


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by kind."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    lm_head: int
    """0 where it is the embedding."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.attention + self.mlp + self.norms + self.lm_head


def linears(config: ModelConfig) -> tuple[Linear, ...]:
    """Return the linear layers of all transformer layers, in their order; lm_head is not among them."""
    return tuple(linear for layer in range(config.num_layers) for linear in _layer(config, layer))


def _layer(config: ModelConfig, layer: int) -> list[Linear]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    if config.architecture == "Phi3ForCausalLM":  # its checkpoints have these fused
        rows = [("qkv_proj", attention, query + 2 * key), ("gate_up_proj", mlp, 2 * inner)]
    else:
        rows = [("q_proj", attention, query), ("k_proj", attention, key), ("v_proj", attention, key)]
        rows += [("gate_proj", mlp, inner), ("up_proj", mlp, inner)]
    biases = {attention: config.qkv_bias, mlp: config.mlp_bias}
    found = [Linear(f"{part}.{name}", layer, hidden, outputs, biases[part]) for name, part, outputs in rows]
    found.append(Linear(f"{attention}.o_proj", layer, query, hidden, config.output_bias))
    found.append(Linear(f"{mlp}.down_proj", layer, inner, hidden, config.mlp_bias))
    return found


def norm_parameters(config: ModelConfig) -> int:
    """Return the parameters of one layer's norms: two of the hidden size, Gemma's four, and those of query and key."""
    per_layer = 4 if config.architecture == "Gemma3ForCausalLM" else 2
    return per_layer * config.hidden_size + 2 * config.head_dim * config.qk_norm


def count_parameters(config: ModelConfig) -> Parameters:
    """Return the numbers of parameters by kind."""
    sizes = {"self_attn": 0, "mlp": 0}
    for linear in linears(config):
        sizes[linear.name.split(".")[3]] += linear.weights + linear.bias * linear.outputs
    embedding = config.vocab_size * config.hidden_size
    return Parameters(
        embedding=embedding,
        attention=sizes["self_attn"],
        mlp=sizes["mlp"],
        norms=config.num_layers * norm_parameters(config) + config.hidden_size,
        lm_head=0 if config.tie_word_embeddings else embedding,
    )


def split_excluded(config: ModelConfig, excluded: Sequence[str]) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Return the linear layers to quantize, and those that match a pattern of ``excluded`` and stay as they are.

    Raises:
        DeploymentError: a pattern matches no linear layer.
    """
    layers = linears(config)
    for pattern in excluded:
        if not any(fnmatchcase(linear.name, pattern) for linear in layers):
            raise DeploymentError(f"exclude {pattern!r} matches no linear layer; they are named like {layers[0].name}")
    kept = tuple(linear for linear in layers if any(fnmatchcase(linear.name, pattern) for pattern in excluded))
    left_out = {linear.name for linear in kept}
    return tuple(linear for linear in layers if linear.name not in left_out), kept
