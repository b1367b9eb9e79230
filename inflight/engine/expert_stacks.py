"""Loads tensors that hold all experts of a layer; the model has a matrix for each expert."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight.engine.models.architectures import ARCHITECTURES
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.naming import CheckpointNames
from inflight.engine.quant.formats import E8M0_NAN, MXFP4_BLOCK
from inflight.engine.quant.linears import QuantizedLinear
from inflight.errors import DeploymentError

_SUFFIXES = {"weight_scale": "_scales", "bias": "_bias"}
"""What the name of a tensor ends with, by what it holds; weights in blocks end with ``_blocks``."""


class ExpertStack(NamedTuple):
    """The tensor of all experts of a layer, where a checkpoint has them in one."""

    parts: list[Tensor]
    """Those of each expert."""
    columns_first: bool
    """Whether columns come before rows."""
    interleaved: bool
    """Whether rows of gate and up take turns."""
    blocks: int = 0
    """Bytes of a block, where the columns are in blocks; 0: they are not."""
    either: bool = False
    """Whether columns may also come before rows, which only the shape tells."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the checkpoint's tensor."""
        return self.parts[0].dtype

    @property
    def shape(self) -> torch.Size:
        """Of the checkpoint's tensor."""
        own = list(self.parts[0].shape)
        if self.blocks:
            own = [*own[:-1], own[-1] // self.blocks, self.blocks]
        return torch.Size([len(self.parts), *(reversed(own) if self.columns_first else own)])

    def oriented(self, tensor: Tensor) -> Tensor:
        """Return the checkpoint's tensor with rows before columns, where it may have them either way."""
        rows_last = self.either and tensor.dim() == 3 and tensor.shape != self.shape
        return tensor.transpose(1, 2) if rows_last else tensor

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy the checkpoint's tensor, which is called ``name``, to the experts.

        Raises:
            DeploymentError: a scale is not a number.
        """
        if name.endswith("_scales") and (tensor == E8M0_NAN).any():
            raise DeploymentError(f"checkpoint: tensor {name} has a scale that is not a number")
        for part, source in zip(self.parts, tensor, strict=True):
            rows = source.t() if self.columns_first else source.flatten(1) if self.blocks else source
            part.copy_(torch.cat((rows[::2], rows[1::2])) if self.interleaved else rows)


def expert_stacks(model: DecoderModel, naming: CheckpointNames) -> tuple[dict[str, ExpertStack], set[str]]:
    """Return where the tensors go that hold all experts of a layer, and the names of the parameters that they fill.

    Raises:
        DeploymentError: they may have rows and columns either way, and are square.
    """
    stacks, filled = dict[str, ExpertStack](), set[str]()
    layout = ARCHITECTURES[model.config.architecture].stacked
    for layer, block in ((name, one) for name, one in model.named_modules() if isinstance(one, MoeBlock)):
        for ours, parameter in block.experts[0].named_parameters():
            linear, _, kind = ours.partition(".")
            stack = naming.of_stack(f"{layer}.experts.0.{linear}")
            if stack is None:
                continue
            quantized = isinstance(block.experts[0].get_submodule(linear), QuantizedLinear)
            matrix = kind == "weight" and not quantized
            if layout == "either" and matrix and parameter.shape[0] == parameter.shape[1]:
                raise DeploymentError(f"checkpoint: {stack} is square, so that rows cannot be told from columns")
            suffix = _SUFFIXES.get(kind, "_blocks" if quantized else "")
            stacks[stack + suffix] = ExpertStack(
                parts=[expert.get_parameter(ours).data for expert in block.experts],
                columns_first=layout in ("transposed", "interleaved") and matrix,
                interleaved=layout == "interleaved" and linear == "gate_up_proj",
                blocks=MXFP4_BLOCK // 2 if suffix == "_blocks" else 0,
                either=layout == "either" and matrix,
            )
            filled |= {f"{layer}.experts.{index}.{ours}" for index in range(len(block.experts))}
    return stacks, filled
