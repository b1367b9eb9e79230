"""What a model's shape alone says: its layers and parameters, and what each GPU of a group holds, reads and computes.

Everything here follows from ``config.json``; no weights are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from inflight.engine.models.config import ARCHITECTURES, ModelConfig
from inflight.errors import DeploymentError
from inflight.export.plan.gpus import Arithmetic
from inflight.export.plan.precision import Precision

GPUS_PER_MACHINE = 8
"""Tensor parallelism stays within a machine: its all-reduces, two per layer, need the fast interconnect."""
MAX_GPUS = 32
"""The largest group that is considered where the request sets no limit: four machines."""


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

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        return self.weights + self.bias * self.outputs

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
    if ARCHITECTURES[config.architecture].fused_in_checkpoint:
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
    """Return the parameters of one layer's norms: those of the hidden size, and those of query and key."""
    return (
        ARCHITECTURES[config.architecture].norms_per_layer * config.hidden_size + 2 * config.head_dim * config.qk_norm
    )


def count_parameters(config: ModelConfig) -> Parameters:
    """Return the numbers of parameters by kind."""
    sizes = {"self_attn": 0, "mlp": 0}
    for linear in linears(config):
        sizes[linear.name.split(".")[3]] += linear.parameters
    embedding = config.vocab_size * config.hidden_size
    return Parameters(
        embedding=embedding,
        attention=sizes["self_attn"],
        mlp=sizes["mlp"],
        norms=config.num_layers * norm_parameters(config) + config.hidden_size,
        lm_head=0 if config.tie_word_embeddings else embedding,
    )


def split_excluded(
    config: ModelConfig, excluded: Sequence[str], option: str = "exclude"
) -> tuple[tuple[Linear, ...], tuple[Linear, ...]]:
    """Return the linear layers to quantize, and those that match a pattern of ``excluded`` and stay as they are.

    ``option`` is what the user gave the patterns with; the error names it.

    Raises:
        DeploymentError: a pattern matches no linear layer.
    """
    layers = linears(config)
    for pattern in excluded:
        if not any(fnmatchcase(linear.name, pattern) for linear in layers):
            raise DeploymentError(f"{option} {pattern!r} matches no linear layer; they are named like {layers[0].name}")
    kept = {linear for linear in layers if any(fnmatchcase(linear.name, pattern) for pattern in excluded)}
    return tuple(one for one in layers if one not in kept), tuple(one for one in layers if one in kept)


@dataclass(frozen=True)
class Parallel:
    """Sizes of a group of GPUs that serves one copy of the model."""

    tensor: int = 1
    """GPUs that share each layer."""
    pipeline: int = 1
    """Groups of them that share the layers."""

    @property
    def gpus(self) -> int:
        """GPUs of the group."""
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Shape:
    """A model in a precision."""

    config: ModelConfig
    precision: Precision
    kv_cache: str
    """Type of the KV cache's numbers."""
    kv_number_bytes: int
    """Bytes of each."""
    excluded: tuple[str, ...] = ()
    """Patterns of the names of linear layers that stay at 16 bits."""
    free_windows: bool = False
    """Whether the engine lets go of KV that has left a layer's window."""

    def stages(self, parallel: Parallel) -> tuple[Stage, ...]:
        """Return what one GPU of each pipeline stage has; layers are spread evenly, the first stages get the rest."""
        count, config = parallel.pipeline, self.config
        short, rest = divmod(config.num_layers, count)
        ends = [short * (index + 1) + min(index + 1, rest) for index in range(count)]
        starts = [0, *ends[:-1]]
        return tuple(
            self._stage(parallel, range(start, end), first=start == 0, last=end == config.num_layers)
            for start, end in zip(starts, ends, strict=True)
        )

    def _stage(self, parallel: Parallel, layers: range, first: bool, last: bool) -> Stage:
        config, base, tensor = self.config, self.precision.base, parallel.tensor
        quantized, kept = split_excluded(config, self.excluded)
        flops: Counter[Arithmetic] = Counter()
        linear_bytes = 0.0
        plain: Arithmetic = "float32" if base == 4 else "fp16"
        for linear in (one for one in quantized if one.layer in layers):
            linear_bytes += linear.bytes(self.precision)
            flops[self.precision.arithmetic] += 2 * linear.weights
        for linear in (one for one in kept if one.layer in layers):
            linear_bytes += linear.parameters * base
            flops[plain] += 2 * linear.weights
        table = config.vocab_size * config.hidden_size * base / tensor
        norms = (len(layers) * norm_parameters(config) + last * config.hidden_size) * base
        copies = first + last - (first and last and config.tie_word_embeddings)
        return Stage(
            windows=config.windows[layers.start : layers.stop],
            weight_bytes=round(linear_bytes / tensor + norms + copies * table),
            linear_bytes=linear_bytes / tensor + norms,
            head_bytes=table * last,
            flops_per_token={kind: count / tensor for kind, count in flops.items()},
            head_arithmetic=plain,
            head_flops=2 * config.vocab_size * config.hidden_size / tensor * last,
            attention_flops=4 * config.num_heads * config.head_dim / tensor,
            kv_layer_bytes=2 * config.num_kv_heads * config.head_dim * self.kv_number_bytes / tensor,
            hidden_bytes=config.hidden_size * base,
            free_windows=self.free_windows,
        )

    def tensor_parallel_sizes(self, limit: int) -> list[int]:
        """Return how many GPUs can share each layer, up to ``limit`` and up to a machine; 1 always can.

        Whole heads, whole channels and whole groups of a scale go to each.
        """
        config, group = self.config, self.precision.group or 1
        # The inputs of o_proj and down_proj are split, and scales run along inputs.
        split_inputs = (config.num_heads * config.head_dim, config.intermediate_size)

        def divides(tensor: int) -> bool:
            heads = config.num_heads % tensor == 0 and config.num_kv_heads % tensor == 0
            return heads and all(size % tensor == 0 and size // tensor % group == 0 for size in split_inputs)

        return [size for size in range(1, min(limit, GPUS_PER_MACHINE) + 1) if size == 1 or divides(size)]


@dataclass(frozen=True)
class Stage:
    """One GPU's part of the model; sizes in bytes, work in floating-point operations."""

    windows: tuple[int | None, ...]
    """The window of each layer; None: it sees all tokens."""
    weight_bytes: int
    """The bytes of the weights that stay in the GPU's memory."""
    linear_bytes: float
    """The bytes that every step reads, without those of lm_head; of the embedding a step reads a few rows only."""
    head_bytes: float
    """The bytes of lm_head, which every step reads that samples."""
    flops_per_token: Mapping[Arithmetic, float]
    """The work of the linear layers: a multiplication and an addition per weight."""
    head_arithmetic: Arithmetic
    head_flops: float
    """The work of lm_head per sampled token."""
    attention_flops: float
    """The work per layer, token and token attended: scores and weighted sum."""
    kv_layer_bytes: float
    """The bytes of a key and a value per token and layer; multi-query, grouped and multi-head attention differ in
    ``num_kv_heads`` alone."""
    hidden_bytes: int
    """One token's hidden state, which GPUs exchange."""
    free_windows: bool

    @cached_property
    def _layers_by_window(self) -> Mapping[int | None, int]:
        """A plan asks thousands of times for the sum over the layers, and there are few kinds of them."""
        return Counter(self.windows)

    def attended(self, context: float) -> float:
        """Return the tokens attended, summed over the layers, by a token at ``context``."""
        return sum(layers * min(context, window or context) for window, layers in self._layers_by_window.items())

    def kv_bytes(self, length: float) -> float:
        """Return the bytes that a sequence of ``length`` tokens keeps in the cache."""
        held = self.attended(length) if self.free_windows else length * len(self.windows)
        return held * self.kv_layer_bytes
