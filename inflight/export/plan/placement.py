"""How a model lies on GPUs: what each GPU of a tensor- and pipeline-parallel group holds, reads and computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from inflight.engine.models.config import ModelConfig
from inflight.export.plan.gpus import Arithmetic
from inflight.export.plan.precision import Precision
from inflight.export.plan.shape import Linear, norm_parameters, split_excluded

GPUS_PER_MACHINE = 8
"""Tensor parallelism stays within a machine: its all-reduces, two per layer, need the fast interconnect."""
MAX_GPUS = 32
"""The largest group that is considered where the request sets no limit: four machines."""


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
        for linear in _within(quantized, layers):
            linear_bytes += linear.bytes(self.precision)
            flops[self.precision.arithmetic] += 2 * linear.weights
        for linear in _within(kept, layers):
            linear_bytes += linear.weights * base + linear.bias * linear.outputs * base
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
            free_windows=self.free_windows,
        )

    def divides(self, tensor: int) -> bool:
        """Whether ``tensor`` GPUs can share each layer: whole heads, whole channels, whole groups of a scale."""
        config, group = self.config, self.precision.group or 1
        heads = config.num_heads % tensor == 0 and config.num_kv_heads % tensor == 0
        # The inputs of o_proj and down_proj are split, and scales run along inputs.
        split_inputs = (config.num_heads * config.head_dim, config.intermediate_size)
        return heads and all(size % tensor == 0 and size // tensor % group == 0 for size in split_inputs)

    def tensor_parallel_sizes(self, limit: int) -> list[int]:
        """Return the sizes up to ``limit`` GPUs, and up to a machine, that divide the model; 1 always does."""
        return [size for size in range(1, min(limit, GPUS_PER_MACHINE) + 1) if size == 1 or self.divides(size)]


@dataclass(frozen=True)
class Stage:
    """One GPU's part of the model; sizes in bytes, work in floating-point operations."""

    windows: tuple[int | None, ...]
    """Per layer of the stage."""
    weight_bytes: int
    """Resident."""
    linear_bytes: float
    """Read by every step, without lm_head; of the embedding a step reads a few rows only."""
    head_bytes: float
    """Read by every step that samples."""
    flops_per_token: Mapping[Arithmetic, float]
    """Of the linear layers: a multiplication and an addition per weight."""
    head_arithmetic: Arithmetic
    head_flops: float
    """Per sampled token."""
    attention_flops: float
    """Per layer, token and token attended: scores and weighted sum."""
    kv_layer_bytes: float
    """Per token and layer: a key and a value; multi-query, grouped and multi-head attention differ in ``num_kv_heads``
    alone."""
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


def _within(linears: tuple[Linear, ...], layers: range) -> Iterable[Linear]:
    return (linear for linear in linears if linear.layer in layers)
