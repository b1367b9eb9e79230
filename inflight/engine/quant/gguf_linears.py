"""Linears whose weight stays in the blocks of a GGUF file, and is decoded for each call."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from inflight.engine.quant.gguf_blocks import FORMATS, MXFP4, Groups, decode, unpack
from inflight.engine.quant.linears import LinearShape, QuantizedLinear
from inflight.gguf.types import BLOCKS, TensorType


class GgufLinear(QuantizedLinear):
    """A weight in blocks: uint8 ``[rows, bytes of a row]``; a class for each type of blocks."""

    type: ClassVar[TensorType]

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self._hold("weight", (shape.rows, self.type.bytes_of(shape.columns)), torch.uint8)

    @property
    def elements(self) -> int:
        return self.weight.numel() // self.type.size * self.type.block

    def takes_inputs_as(self, other: QuantizedLinear) -> bool:
        return isinstance(other, GgufLinear) and (self.bias is None) == (other.bias is None)

    def decode(self, dtype: torch.dtype) -> Tensor:
        return decode(self.weight, self.type.name).to(dtype)

    def groups(self) -> Groups:
        """Return the weight as integers, scales and minimums."""
        return unpack(self.weight.detach(), self.type.name)


GGUF_LINEARS: dict[str, type[GgufLinear]] = {
    kind: type(f"{kind}BlockLinear", (GgufLinear,), {"quant_algo": kind, "type": BLOCKS[kind]})
    for kind in FORMATS
    if kind != MXFP4  # which becomes what other checkpoints have, see ``gguf_blocks.mxfp4_parts``
}
"""By the scheme's name, which is that of the blocks."""
