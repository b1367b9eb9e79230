"""What a Gated DeltaNet's shape alone says; the rest of a model is in ``shape``."""

from __future__ import annotations

import math

from inflight.engine.models.config import GatedDeltaNetConfig

_FLOPS = 7
"""Per number of the matrix and token: decay, answer to the key, correction, answer to the query."""


def projections(shape: GatedDeltaNetConfig, hidden: int) -> list[tuple[str, int, int, bool]]:
    """Return the linears: name, inputs, outputs, and whether there is a bias."""
    values, heads = shape.value_heads * shape.value_dim, shape.value_heads
    rows = {"in_proj_qkv": shape.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    if shape.interleaved:
        rows = {"in_proj_qkvz": shape.channels + values, "in_proj_ba": 2 * heads}
    return [*((name, hidden, size, False) for name, size in rows.items()), ("out_proj", values, hidden, False)]


def vectors(shape: GatedDeltaNetConfig) -> int:
    """Return the parameters that are not in linears."""
    return shape.channels * shape.taps + 2 * shape.value_heads + shape.value_dim


def state_bytes(shape: GatedDeltaNetConfig, number_bytes: int) -> int:
    """Return the bytes of a sequence's state: its matrix is in float32, its convolution in the type of the weights."""
    return 4 * math.prod(shape.matrix_shape) + number_bytes * math.prod(shape.conv_shape)


def state_flops(shape: GatedDeltaNetConfig) -> int:
    """Return the work per token, without that of linears."""
    return _FLOPS * math.prod(shape.matrix_shape)
