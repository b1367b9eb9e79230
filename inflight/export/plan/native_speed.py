"""NativeSpeed: how fast the native step multiplies weights and attends on this machine, as ``native_measure`` finds it.

It knows figures; not how they are measured, nor what a model needs of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from inflight.engine.native.bindings import Packed

Positive = Annotated[float, Field(gt=0)]


class AttentionSpeed(BaseModel):
    """How fast attention is with keys and values of one type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read_gb_s: Positive
    """GB/s of keys and values, while sequences decode."""
    tflops: Positive
    """TFLOP/s, while a prompt is computed."""


class NativeSpeed(BaseModel):
    """The native step's measured speeds on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction_set: str
    threads: int
    weights: Mapping[str, Mapping[int, Positive]]
    """GB/s of weights, by the name of what they are packed as (``Packed``) and the tokens of the step, ascending. One
    token waits for memory, or for weights to be decoded; many are bound by arithmetic."""
    attention: Mapping[str, AttentionSpeed]
    """Attention's speed by the type of the KV cache."""

    def seconds(self, packed: Packed, nbytes: float, tokens: float) -> float:
        """Return how long ``tokens`` take to be multiplied by ``nbytes`` of weights.

        Between two measured numbers of tokens the time is on the line between theirs; beyond the last, it grows with
        the tokens.
        """
        rates = self.weights[packed.name]
        counts, of_a_gb = list(rates), [1 / rate for rate in rates.values()]
        times = float(np.interp(tokens, counts, of_a_gb)) * max(1.0, tokens / counts[-1])
        return nbytes / 1e9 * times
