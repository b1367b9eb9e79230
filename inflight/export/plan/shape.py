"""What a model's shape alone says: its layers and parameters, and what each GPU of a group holds, reads and computes.

Everything here follows from ``config.json``; no weights are read.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.config import AttentionConfig, ExpertsConfig, Matrix, ModelConfig
from inflight.engine.models.limits import why_not_native
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.native.bindings import Packed
from inflight.errors import DeploymentError
from inflight.export.plan import attention, delta_net
from inflight.export.plan.gpus import Arithmetic
from inflight.export.plan.precision import Precision, StoredWeights
from inflight.export.plan.stage import AttentionWork, LinearWork, Stage

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
    kind: Literal["attention", "mlp"]
    share: float = 1.0
    """Of the tokens, how many it multiplies: an expert those that are routed to it."""

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
    if config.outlined is not None:
        return tuple(map(_outlined, config.outlined.matrices))
    return tuple(linear for layer in range(config.num_layers) for linear in _layer(config, layer))


def grouped(precision: Precision, config: ModelConfig, excluded: tuple[str, ...] = ()) -> Precision:
    """Return a precision with the longest groups that divide the inputs of each linear which it quantizes.

    Raises:
        DeploymentError: none does; a linear is named.
    """
    if not precision.group:
        return precision
    quantized, _ = split_excluded(config, excluded)
    size, shortest = precision.group, precision.shortest_group
    while size > shortest and any(one.inputs % size for one in quantized):
        size //= 2
    odd = next((one for one in quantized if one.inputs % size), None)
    if odd is not None:
        raise DeploymentError(
            f"precision {precision.name}: {odd.name} has {odd.inputs} inputs, and groups of {size} must divide them"
        )
    return replace(precision, group=size)


def _outlined(matrix: Matrix) -> Linear:
    layer = re.search(r"\d+", matrix.name)  # the first number in a name is the layer's
    kind: Literal["attention", "mlp"] = "attention" if "att" in matrix.name else "mlp"
    return Linear(
        matrix.name, int(layer[0]) if layer else 0, matrix.inputs, matrix.outputs, matrix.bias, kind, matrix.share
    )


def _layer(config: ModelConfig, layer: int) -> list[Linear]:
    hidden, one = config.hidden_size, config.layers[layer]
    fused = ARCHITECTURES[config.architecture].fused_in_checkpoint
    above, mlp = f"model.layers.{layer}", f"model.layers.{layer}.mlp"
    projections = {"self_attn": attention.projections(one.attention, hidden, fused) if one.attention else []}
    projections["linear_attn"] = delta_net.projections(one.recurrent, hidden) if one.recurrent else []
    found = [
        Linear(f"{above}.{part}.{name}", layer, inputs, rows, bias, "attention")
        for part, own in projections.items()
        for name, inputs, rows, bias in own
    ]
    if one.intermediate_size:
        found += _feed_forward(mlp, layer, hidden, one.intermediate_size, config.mlp_bias, fused)
    if one.experts is not None:
        found += _experts(f"model.layers.{layer}.moe" if config.gemma4 else mlp, layer, config, one.experts)
    if config.gemma4 and (size := config.gemma4.per_layer_size):
        found.append(Linear(f"{above}.per_layer_input_gate", layer, hidden, size, False, "mlp"))
        found.append(Linear(f"{above}.per_layer_projection", layer, size, hidden, False, "mlp"))
    naming = CheckpointNames(config, ())
    return [replace(linear, name=naming.of(linear.name)) for linear in found]


def _experts(above: str, layer: int, config: ModelConfig, experts: ExpertsConfig) -> list[Linear]:
    hidden, share = config.hidden_size, experts.per_token / experts.num_experts
    found = [Linear(f"{above}.gate", layer, hidden, experts.num_experts, experts.bias, "mlp")]
    for index in range(experts.num_experts):
        name = f"{above}.experts.{index}"
        found += _feed_forward(name, layer, hidden, experts.intermediate_size, experts.bias, False, share)
    if experts.shared_size:
        found += _feed_forward(f"{above}.shared_expert", layer, hidden, experts.shared_size, config.mlp_bias, False)
    if experts.shared_gate:
        found.append(Linear(f"{above}.shared_expert_gate", layer, hidden, 1, False, "mlp"))
    return found


def _feed_forward(
    above: str, layer: int, hidden: int, inner: int, bias: bool, fused: bool, share: float = 1.0
) -> list[Linear]:
    rows = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
    found = [Linear(f"{above}.{name}", layer, hidden, size, bias, "mlp", share) for name, size in rows.items()]
    return [*found, Linear(f"{above}.down_proj", layer, inner, hidden, bias, "mlp", share)]


def norm_parameters(config: ModelConfig, layers: range) -> int:
    """Return the parameters of norms, and of other vectors, of some layers; with the last, of the norm behind it."""
    if config.outlined is not None:  # it is not known of which layer they are
        return config.outlined.others if 0 in layers else 0
    last = config.num_layers - 1 in layers
    return sum(_norm_parameters(config, layer) for layer in layers) + last * config.hidden_size


def _norm_parameters(config: ModelConfig, layer: int) -> int:
    """Return the parameters of a layer's norms, of the hidden size and of query and key, and its other vectors."""
    one, recurrent = config.layers[layer].attention, config.layers[layer].recurrent
    norms = {"before": 2, "around": 4, "behind": 2}[config.norms] * config.hidden_size
    experts, extra = config.layers[layer].experts, config.gemma4
    norms += attention.vectors(one) if one is not None else 0
    norms += delta_net.vectors(recurrent) if recurrent is not None else 0
    if experts is not None and experts.routing == "sigmoid":
        norms += experts.num_experts
    if extra is not None:
        norms += 1 + (config.hidden_size if extra.per_layer_size else 0)
        norms += 4 * config.hidden_size + experts.num_experts if experts is not None else 0
    return norms


def count_parameters(config: ModelConfig) -> Parameters:
    """Return the numbers of parameters by kind."""
    sizes = {"attention": 0, "mlp": 0}
    for linear in linears(config):
        sizes[linear.kind] += linear.parameters
    embedding, head = _tables(config)
    per_layer, norm_per_layer = _per_layer_embedding(config)
    return Parameters(
        embedding=embedding + per_layer,
        attention=sizes["attention"],
        mlp=sizes["mlp"],
        norms=norm_parameters(config, range(config.num_layers)) + norm_per_layer,
        lm_head=head,
    )


def _tables(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of the embedding, and of ``lm_head``: 0 where it is the embedding."""
    if config.outlined is not None:
        return config.outlined.embedding, config.outlined.head
    size = config.vocab_size * config.hidden_size
    return size, 0 if config.tie_word_embeddings else size


def _per_layer_embedding(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of Gemma 4's embeddings for each layer and what projects to them, and of their norm."""
    if config.gemma4 is None or not config.gemma4.per_layer_size:
        return 0, 0
    width = config.num_layers * config.gemma4.per_layer_size
    return (config.gemma4.per_layer_vocab + config.hidden_size) * width, config.gemma4.per_layer_size


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
    stored: StoredWeights | None = None
    """How the checkpoint holds them, where it is quantized already; ``precision`` is what follows from that."""

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
        plain, plain_packed = self._plain
        sizes: defaultdict[tuple[Arithmetic, Packed | None, float], float] = defaultdict(float)
        flops: defaultdict[tuple[Arithmetic, Packed | None, float], float] = defaultdict(float)
        for linear, size in self._sizes.items():
            if linear.layer in layers:
                kind = (plain, plain_packed) if size is None else (self.precision.arithmetic, self._packed(linear))
                sizes[*kind, linear.share] += linear.parameters * base if size is None else size
                flops[*kind, linear.share] += 2 * linear.weights * linear.share
        embedding, head = (count * base / tensor for count in _tables(config))
        sizes[plain, plain_packed, 1.0] += norm_parameters(config, layers) * base * tensor  # each GPU has them all
        own = [one for layer, one in config.attention.items() if layer in layers]
        states = [one for layer, one in config.recurrent.items() if layer in layers]
        extra = sum(_per_layer_embedding(config)) * base
        table = head or embedding if last else 0.0
        both = first and last and not head
        return Stage(
            layers=tuple(
                AttentionWork(
                    window=one.window if one.chunk is None else one.chunk,
                    flops=2 * one.num_heads * (one.head_dim + one.value_dim) / tensor,
                    kv_bytes=_stored(one) * self.kv_number_bytes / (1 if one.latent else tensor),
                )
                for one in own
            ),
            state_bytes=sum(delta_net.state_bytes(one, base) for one in states) / tensor,
            state_flops=sum(delta_net.state_flops(one) for one in states) / tensor,
            weight_bytes=round(sum(sizes.values()) / tensor + table + (first and not both) * embedding + first * extra),
            linears=tuple(LinearWork(*kind, size / tensor, flops[kind] / tensor) for kind, size in sizes.items()),
            head_bytes=table,
            head_arithmetic=plain,
            head_packed=plain_packed,
            head_flops=2 * config.vocab_size * config.hidden_size / tensor * last,
            hidden_bytes=config.hidden_size * base,
            kv_cache=self.kv_cache,
            free_windows=self.free_windows,
        )

    @property
    def _plain(self) -> tuple[Arithmetic, Packed | None]:
        """What is not quantized is computed in, and what the native step packs it as."""
        full = self.precision.base == 4
        packed = Packed.FLOAT32 if full else Packed.BFLOAT16
        return "float32" if full else "fp16", packed if self._by_native_step else None

    def _packed(self, linear: Linear) -> Packed | None:
        """Return what the native step packs a linear as that is quantized."""
        if not self._by_native_step:
            return None
        return self.precision.packed if self.stored is None else self.stored.packed[linear.name]

    @property
    def _by_native_step(self) -> bool:
        """Whether the native step computes the model, where there is one."""
        return self.precision.packed is not None and why_not_native(self.config) is None

    @cached_property
    def _sizes(self) -> Mapping[Linear, int | None]:
        """The bytes of each linear layer that is quantized; None: it is not."""
        if self.stored is not None:
            held, base = self.stored.sizes, self.precision.base
            return {
                one: held[one.name] + one.bias * one.outputs * base if one.name in held else None
                for one in linears(self.config)
            }
        quantized, kept = split_excluded(self.config, self.excluded)
        return {one: one.bytes(self.precision) for one in quantized} | dict.fromkeys(kept)

    def tensor_parallel_sizes(self, limit: int) -> list[int]:
        """Return how many GPUs can share each layer, up to ``limit`` and up to a machine; 1 always can.

        Whole heads, whole channels and whole groups of a scale go to each.
        """
        config, group = self.config, self.precision.group or 1
        # The inputs of o_proj and down_proj are split, and scales run along inputs.
        heads = {size for one in config.attention.values() for size in _split_heads(one)}
        heads |= {size for one in config.recurrent.values() for size in (one.key_heads, one.value_heads)}
        split_inputs = {
            one.inputs for one in linears(config) if one.name.endswith(("o_proj", "out_proj", "down_proj", "w2"))
        }

        def divides(tensor: int) -> bool:
            return all(size % tensor == 0 for size in heads) and all(
                size % tensor == 0 and size // tensor % group == 0 for size in split_inputs
            )

        return [size for size in range(1, min(limit, GPUS_PER_MACHINE) + 1) if size == 1 or divides(size)]


def _split_heads(config: AttentionConfig) -> tuple[int, ...]:
    """Return the numbers of heads that GPUs must share evenly; each has the latent vector whole."""
    return (config.num_heads,) if config.latent else (config.num_heads, config.num_kv_heads)


def _stored(config: AttentionConfig) -> int:
    """Return how many numbers a token has in the cache; in latent attention the value is a part of the key."""
    if config.kv_donor is not None:
        return 0
    return config.num_kv_heads * (config.head_dim + (0 if config.latent else config.value_dim))
