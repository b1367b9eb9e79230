"""Puts quantized linears into a model, before its weights are loaded; the model itself knows nothing of them.

Where PyTorch multiplies by them, their weights can be decoded once, after loading, rather than for each call: decoding
moves several times the bytes of the weight itself, and would be most of a decode step. What is computed is the same:
inputs are rounded as before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.latent import LatentAttention
from inflight.engine.models.layers import each_of
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import ExactLinear, Int8Linear, LinearShape, QuantizedLinear
from inflight.errors import DeploymentError

_Linear = TypeVar("_Linear", bound=QuantizedLinear)


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
    unknown, naming = (
        set(quantization.layers if quantization else ()),
        CheckpointNames(model.config, names),
    )
    for name, linear in [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        if name == "lm_head" and model.config.tie_word_embeddings:
            continue
        above, published = name.rpartition(".")[0], naming.of(name)
        whole = f"{published}.weight" in names or naming.of_stack(name)
        fused = {} if whole else model.fused_rows.get(name, {})
        sizes = {naming.of(f"{above}.{part}"): rows for part, rows in fused.items()} or {published: linear.out_features}
        unknown -= sizes.keys()
        held = {part: quantization.of(part) if quantization else None for part in sizes}
        inside = exact and linear is not model.lm_head  # nothing rounds what comes after it
        if fused and not separate and not any(held.values()):
            sizes, held = {published: linear.out_features}, {published: None}
        made = [
            _quantized(linear, part, rows, kind, f"{part}.pre_quant_scale" in names, exact)
            if (kind := held[part])
            else _plain(linear, rows, inside)
            for part, rows in sizes.items()
        ]
        model.set_submodule(name, LinearParts(zip(fused, made, strict=True)) if len(made) > 1 else made[0])
    if unknown:
        raise DeploymentError(f"checkpoint: quantized_layers names {min(unknown)}; the model has no such layer")


def products(model: nn.Module, kind: type[_Linear]) -> Iterator[tuple[str, list[_Linear]]]:
    """Yield the modules of a loaded model that can be one product each, by name, with their linears of a kind.

    First come the fused projections whose parts take inputs alike, then the linears that are left by then.
    """
    for outer in (LinearParts, kind):
        for name, module in each_of(model, outer):
            children = list(module.children()) if isinstance(module, LinearParts) else [module]
            parts = [child for child in children if isinstance(child, kind)]
            if len(parts) == len(children) and all(parts[0].takes_inputs_as(part) for part in parts):
                yield name, parts


def join_int8_parts(model: nn.Module) -> None:
    """Make one product of the parts of a fused projection, in a loaded model, where all of them are INT8."""
    for name, parts in products(model, Int8Linear):
        if len(parts) > 1:
            model.set_submodule(name, Int8Linear.joined(parts))


class DecodedLinear(nn.Module):
    """A linear, or several of one input as one product."""

    def __init__(self, parts: list[QuantizedLinear], dtype: torch.dtype) -> None:
        """``parts``: loaded linears that round the same input in the same way; ``dtype``: of the computation."""
        super().__init__()
        self._linear = parts[0].linear
        self.weight = nn.Parameter(torch.cat([part.decode(dtype) for part in parts]), requires_grad=False)
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        changes = parts[0].rounds_inputs() or parts[0].pre_quant_scale is not None
        self.prepared = parts[0].without_weight().prepared if changes else None
        """What inputs go through before the product; None: through nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        return self._linear(x if self.prepared is None else self.prepared(x), self.weight, self.bias)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``[rows, columns]``, as ``QuantizedLinear`` does."""
        return self.weight.to(dtype)


def decode_latent_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Decode what latent attention multiplies by head by head, in a loaded model: no product takes it as it is."""
    for name, attention in each_of(model, LatentAttention):
        if isinstance(attention.kv_b_proj, QuantizedLinear):
            model.set_submodule(f"{name}.kv_b_proj", DecodedLinear([attention.kv_b_proj], dtype))


def decoding_cost(model: nn.Module, dtype: torch.dtype, joined: bool = True) -> tuple[int, int]:
    """Return how many linears ``decode_weights`` would decode to ``dtype``, and how many bytes more they then take."""
    quantized = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    linears = [linear for linear in quantized if joined or linear.decodes_each_time(dtype)]
    decoded = sum(linear.elements for linear in linears) * dtype.itemsize
    return len(linears), decoded - sum(linear.weight_bytes for linear in linears)


def decode_weights(model: nn.Module, dtype: torch.dtype, joined: bool = True) -> None:
    """Decode the quantized linears of a loaded model.

    With ``joined``, parts of one input that round it alike become one product, whose sums may have another order.
    Without, each linear computes to the bit what it did before, and those that multiply by integers stay as they are.
    """
    if joined:
        for name, parts in products(model, QuantizedLinear):  # type: ignore[type-abstract]
            model.set_submodule(name, DecodedLinear(parts, dtype))
        return
    for name, linear in each_of(model, QuantizedLinear):  # type: ignore[type-abstract]
        if linear.decodes_each_time(dtype):
            model.set_submodule(name, DecodedLinear([linear], dtype))


def _quantized(
    linear: nn.Linear, name: str, rows: int, held: LayerQuantization, smoothed: bool, exact: bool
) -> nn.Module:
    """Return a linear in place of ``linear``, or of a part of it, that the checkpoint holds quantized."""
    shape = LinearShape(
        name=name,
        rows=rows,
        columns=linear.in_features,
        bias=linear.bias is not None,
        dtype=linear.weight.dtype,
        group_size=held.group_size or linear.in_features,
        smoothed=smoothed,
        exact=exact,
        layout=held.layout,
    )
    return LINEARS[held.quant_algo](shape)


def _plain(linear: nn.Linear, rows: int, exact: bool) -> nn.Linear:
    """Return a linear like ``linear``, or like a part of it, that is not quantized."""
    kind = ExactLinear if exact else nn.Linear
    return kind(linear.in_features, rows, linear.bias is not None, device="meta", dtype=linear.weight.dtype)
