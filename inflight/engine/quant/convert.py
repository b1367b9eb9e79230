"""Puts quantized linears into a model, before its weights are loaded; the model itself knows nothing of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.modules import each_of
from inflight.engine.quant.config import Quantization
from inflight.engine.quant.linears import SCHEMES, ExactLinear, Int8Linear, LinearShape
from inflight.errors import DeploymentError


class LinearParts(nn.Module):
    """Linears of one input whose outputs lie in a row: a fused projection whose parts are quantized differently."""

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """
        Args:
            parts: by their names in the checkpoint, in the order of their rows.
        """
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
    swap = _Swap(model, quantization, names, exact, separate)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not (name == "lm_head" and model.config.tie_word_embeddings):
            swap.linear(name, module)
    swap.finish()


def join_int8_parts(model: nn.Module) -> None:
    """Make one product of the parts of a fused projection, in a loaded model, where all of them are INT8."""
    for name, module in each_of(model, LinearParts):
        parts = [part for part in module.children() if isinstance(part, Int8Linear)]
        joined = Int8Linear.joined(parts) if len(parts) == len(list(module.children())) else None
        if joined is not None:
            model.set_submodule(name, joined)


class _Swap:
    def __init__(
        self,
        model: DecoderModel,
        quantization: Quantization | None,
        names: Collection[str],
        exact: bool,
        separate: bool,
    ) -> None:
        self._model, self._quantization, self._names = model, quantization, names
        self._exact, self._separate = exact, separate
        self._unknown = set(quantization.layers) if quantization else set()

    def linear(self, name: str, linear: nn.Linear) -> None:
        """Swap one linear if the checkpoint holds it, or a part of it, quantized."""
        above, _, last = name.rpartition(".")
        rows = self._model.config.fused_rows.get(last)
        if rows is None or f"{name}.weight" in self._names:
            self._model.set_submodule(name, self._quantized(name, linear, linear.out_features) or self._plain(linear))
            return
        parts = {part: self._quantized(f"{above}.{part}", linear, size) for part, size in rows.items()}
        if self._separate or any(parts.values()):
            made = ((part, module or self._plain(linear, rows[part])) for part, module in parts.items())
            self._model.set_submodule(name, LinearParts(made))
        else:
            self._model.set_submodule(name, self._plain(linear))

    def finish(self) -> None:
        """Check that every layer that the checkpoint names has been found."""
        if self._unknown:
            raise DeploymentError(
                f"checkpoint: quantized_layers names {min(self._unknown)}; the model has no such layer"
            )

    def _quantized(self, name: str, linear: nn.Linear, rows: int) -> nn.Module | None:
        """Return the quantized linear for the checkpoint's ``name``, or None where it is not quantized."""
        self._unknown.discard(name)
        held = self._quantization.of(name) if self._quantization else None
        if held is None:
            return None
        shape = LinearShape(
            name=name,
            rows=rows,
            columns=linear.in_features,
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
            group_size=held.group_size,
            smoothed=f"{name}.pre_quant_scale" in self._names,
            exact=self._exact,
        )
        return SCHEMES[held.quant_algo](shape)

    def _plain(self, linear: nn.Linear, rows: int | None = None) -> nn.Linear:
        """Return a linear like ``linear``, or a part of it, that is not quantized."""
        inside = self._exact and linear is not self._model.lm_head  # nothing rounds what comes after it
        kind = ExactLinear if inside else nn.Linear
        columns, dtype = linear.in_features, linear.weight.dtype
        return kind(columns, rows or linear.out_features, linear.bias is not None, device="meta", dtype=dtype)
