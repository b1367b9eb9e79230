"""Puts quantized linears into a model, before its weights are loaded; the model itself knows nothing of them.

On a GPU their weights can be decoded once, after loading, rather than for each call: decoding moves several times the
bytes of the weight itself, and would be most of a decode step. What is computed is the same: inputs are rounded as
before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.layers import each_of
from inflight.engine.quant.config import Quantization
from inflight.engine.quant.linears import SCHEMES, ExactLinear, Int8Linear, LinearShape, QuantizedLinear
from inflight.errors import DeploymentError


class LinearParts(nn.Module):
    """Linears of one input whose outputs lie in a row: a fused projection whose parts are quantized differently."""

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """``parts``: by their names in the checkpoint, in the order of their rows."""
        super().__init__()
        for name, part in parts:
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


def convert_linears(
    model: DecoderModel,
    quantization: Quantization | None,
    names: Collection[str],
    exact: bool,
    separate: bool = False,
) -> None:
    """Swap the linears that the checkpoint holds quantized, and in an ``exact`` model all others in its layers.

    Args:
        model: on the meta device, in the type of the computation.
        quantization: of the checkpoint.
        names: the tensors in the checkpoint.
        exact: add up in float64.
        separate: give every part of a fused projection a linear of its own, quantized or not.

    Raises:
        DeploymentError: the checkpoint names a layer that is not there, or its shape does not suit its scheme.
    """
    unknown = set(quantization.layers if quantization else ())
    converter = _Converter(model, quantization, names, exact, separate, unknown)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not (name == "lm_head" and model.config.tie_word_embeddings):
            converter.convert(name, module)
    if unknown:
        raise DeploymentError(f"checkpoint: quantized_layers names {min(unknown)}; the model has no such layer")


def join_int8_parts(model: nn.Module) -> None:
    """Make one product of the parts of a fused projection, in a loaded model, where all of them are INT8."""
    for name, module in each_of(model, LinearParts):
        parts = [part for part in module.children() if isinstance(part, Int8Linear)]
        joined = Int8Linear.joined(parts) if len(parts) == len(list(module.children())) else None
        if joined is not None:
            model.set_submodule(name, joined)


class DecodedLinear(nn.Module):
    """A linear, or several of one input as one product."""

    def __init__(self, parts: list[QuantizedLinear], dtype: torch.dtype) -> None:
        """``parts``: loaded linears that round the same input in the same way; ``dtype``: of the computation."""
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
        linears = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
        return cls(
            len(linears),
            sum(linear.weight_bytes for linear in linears),
            sum(linear.weight.numel() * linear.per_element for linear in linears) * dtype.itemsize,
        )


def decode_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Decode all quantized linears of a loaded model; parts of one input that round it alike become one product."""
    for name, module in each_of(model, LinearParts):
        children = list(module.children())
        parts = [child for child in children if isinstance(child, QuantizedLinear)]
        if parts and len(parts) == len(children) and all(parts[0].takes_inputs_as(part) for part in parts):
            model.set_submodule(name, DecodedLinear(parts, dtype))
    for name, linear in each_of(model, QuantizedLinear):  # type: ignore[type-abstract]
        model.set_submodule(name, DecodedLinear([linear], dtype))


@dataclass
class _Converter:
    """What ``convert_linears`` was given."""

    model: DecoderModel
    quantization: Quantization | None
    names: Collection[str]
    exact: bool
    separate: bool
    unknown: set[str]
    """The layers that the checkpoint names and that have not been found yet."""

    def convert(self, name: str, linear: nn.Linear) -> None:
        """Swap one linear if the checkpoint holds it, or a part of it, quantized."""
        above, _, last = name.rpartition(".")
        rows = self.model.config.fused_rows.get(last)
        if rows is None or f"{name}.weight" in self.names:
            self.model.set_submodule(name, self._quantized(name, linear, linear.out_features) or self._plain(linear))
            return
        parts = {part: self._quantized(f"{above}.{part}", linear, size) for part, size in rows.items()}
        if self.separate or any(parts.values()):
            made = ((part, module or self._plain(linear, rows[part])) for part, module in parts.items())
            self.model.set_submodule(name, LinearParts(made))
        else:
            self.model.set_submodule(name, self._plain(linear))

    def _quantized(self, name: str, linear: nn.Linear, rows: int) -> nn.Module | None:
        """Return the quantized linear for the checkpoint's ``name``, or None where it is not quantized."""
        self.unknown.discard(name)
        held = self.quantization.of(name) if self.quantization else None
        if held is None:
            return None
        shape = LinearShape(
            name=name,
            rows=rows,
            columns=linear.in_features,
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
            group_size=held.group_size,
            smoothed=f"{name}.pre_quant_scale" in self.names,
            exact=self.exact,
        )
        return SCHEMES[held.quant_algo](shape)

    def _plain(self, linear: nn.Linear, rows: int | None = None) -> nn.Linear:
        """Return a linear like ``linear``, or a part of it, that is not quantized."""
        inside = self.exact and linear is not self.model.lm_head  # nothing rounds what comes after it
        kind = ExactLinear if inside else nn.Linear
        columns, dtype = linear.in_features, linear.weight.dtype
        return kind(columns, rows or linear.out_features, linear.bias is not None, device="meta", dtype=dtype)
