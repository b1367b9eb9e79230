"""Quantized linears whose weights are decoded once, when a model is loaded, rather than for each call.

Decoding moves several times the bytes of the weight itself; on a GPU that is most of a decode step. What is computed is
the same: only the weight's own decoding is taken out of the step, and inputs are rounded as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.modules import each_of
from inflight.engine.quant.convert import LinearParts
from inflight.engine.quant.linears import QuantizedLinear


class DecodedLinear(nn.Module):
    """A linear, or several of one input as one product."""

    def __init__(self, parts: list[QuantizedLinear], dtype: torch.dtype) -> None:
        """
        Args:
            parts: loaded linears that take the same input alike.
            dtype: of the computation.
        """
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.decode(dtype) for part in parts]), requires_grad=False)
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self._prepared = parts[0].without_weight().prepared

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return functional.linear(self._prepared(x), self.weight, self.bias)


@dataclass(frozen=True)
class Decoding:
    """What decoding a model's weights once takes."""

    linears: int
    packed: int
    """Bytes of the weights as they are, with their scales."""
    decoded: int
    """Bytes of the weights decoded."""

    @classmethod
    def of(cls, model: nn.Module, dtype: torch.dtype) -> Decoding:
        """Return what it takes to decode all quantized linears of a model to ``dtype``."""
        linears = list(_quantized(model))
        return cls(
            len(linears),
            sum(linear.weight_bytes for linear in linears),
            sum(linear.weight_count for linear in linears) * dtype.itemsize,
        )


def decode_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Decode all quantized linears of a loaded model; parts of one input that they take alike become one product."""
    for name, module in each_of(model, LinearParts):
        children = list(module.children())
        parts = [child for child in children if isinstance(child, QuantizedLinear)]
        if parts and len(parts) == len(children) and all(parts[0].takes_inputs_as(part) for part in parts):
            model.set_submodule(name, DecodedLinear(parts, dtype))
    for name, linear in each_of(model, QuantizedLinear):  # type: ignore[type-abstract]
        model.set_submodule(name, DecodedLinear([linear], dtype))


def _quantized(model: nn.Module) -> Iterator[QuantizedLinear]:
    return (module for module in model.modules() if isinstance(module, QuantizedLinear))
