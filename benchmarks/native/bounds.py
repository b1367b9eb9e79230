"""What each phase of a native step must do at the least, and how long that takes at the machine's own speed.

After S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009: a phase takes at least as long as its bytes
take at the bandwidth of memory, and as its multiply-adds take at the processor's peak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.checkpoints import Shape
from benchmarks.native.probe import Number, Roofs

_BYTES: dict[Number, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_SCALE = 2
"""Bytes beside each head of a token in a cache in INT8."""
PHASES = ("qkv", "attention", "output", "gate_up", "down", "logits")
"""The phases that have a bound; the others read no weights and no cache."""


@dataclass(frozen=True)
class Load:
    """One step: each stream computes some tokens behind those that it has."""

    streams: int
    start: int
    """Tokens of each stream whose keys are in the cache before."""
    tokens: int
    """Tokens of each stream that are computed; 1 in decode."""

    @property
    def name(self) -> str:
        """What it is called in tables."""
        if self.tokens == 1:
            return f"decode, {self.streams} x {self.start}"
        return f"prefill, {self.streams} x {self.tokens}"


@dataclass(frozen=True)
class Types:
    """What a step's numbers are."""

    weights: Number
    cache: Number

    def multiplied(self, dots: bool) -> tuple[Number, Number]:
        """Return what products with weights, and those of attention, multiply; ``dots``: there are ones of bfloat16.

        Where there are none, bfloat16 is widened and multiplied in float32. A float32 cache is never rounded. Keys in
        INT8 are multiplied as integers, and values are not; the bound counts both as products of floats.
        """
        halves: Number = "bfloat16" if dots else "float32"
        weights = halves if self.weights == "bfloat16" else self.weights
        return weights, "float32" if self.cache == "float32" else halves


@dataclass(frozen=True)
class Work:
    """What a phase must do."""

    bytes: float
    """That it reads: packed weights once, or the keys and values that its tokens attend to, once for each stream."""
    products: float
    """Multiply-adds."""
    of: Number
    """What it multiplies."""


@dataclass(frozen=True)
class Bound:
    """How long a phase takes at the least, in seconds."""

    by_bytes: float
    by_products: float

    @property
    def seconds(self) -> float:
        """The longer of the two: reading and multiplying overlap at best."""
        return max(self.by_bytes, self.by_products)

    @property
    def binding(self) -> str:
        """Which of the two it is."""
        return "bytes" if self.by_bytes >= self.by_products else "arithmetic"


def work_of(
    shape: Shape, load: Load, types: Types, dots: bool, packed_bytes: Callable[[Number, int, int], int]
) -> dict[str, Work]:
    """Return the work of all layers, by the phases of ``PHASES``.

    Args:
        shape: of the model.
        load: of the step; one row of logits for each stream.
        types: of weights and of the cache.
        dots: whether the instruction set multiplies bfloat16.
        packed_bytes: returns the bytes of a packed weight, of its type, inputs and outputs.
    """
    of_weights, of_attention = types.multiplied(dots)
    head_dim = shape.hidden // shape.heads
    sizes = {
        "qkv": (shape.hidden, (shape.heads + 2 * shape.kv_heads) * head_dim),
        "output": (shape.hidden, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
    }
    rows = load.streams * load.tokens
    work = {
        name: Work(
            shape.layers * packed_bytes(types.weights, *size), shape.layers * rows * size[0] * size[1], of_weights
        )
        for name, size in sizes.items()
    }
    keys = load.start + load.tokens
    of_head = head_dim * _BYTES[types.cache] + _SCALE * (types.cache == "int8")
    read = 2 * shape.layers * load.streams * keys * shape.kv_heads * of_head
    pairs = load.tokens * load.start + load.tokens * (load.tokens + 1) // 2  # of a query and a key
    work["attention"] = Work(read, 2 * shape.layers * load.streams * pairs * shape.heads * head_dim, of_attention)
    head = shape.hidden, shape.vocab
    work["logits"] = Work(packed_bytes(types.weights, *head), load.streams * head[0] * head[1], of_weights)
    return {name: work[name] for name in PHASES}


def bound_of(work: Work, roofs: Roofs) -> Bound:
    """Return how long the work takes at the least."""
    return Bound(work.bytes / roofs.bytes_per_s, work.products / roofs.products_per_s[work.of])
