"""The tensors of recurrent layers' states. A slot has those of all layers of one sequence, or of one cached prefix.

The model runner owns the tensors; ``states`` decides who has which slot, and what is to be copied.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from inflight.engine.kvcache.blocks import StateCopy
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.gated_delta_net import DeltaState


class StatePool:
    """The states of all recurrent layers; of a model without any it is empty."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype``: the type of the computation, which a convolution's inputs are kept in; matrices are float32."""
        self.slots, self.device = slots, device
        self.parts: list[Tensor] = []
        """All that is stored, each ``[layers, slots, ...]``."""
        self.layers: dict[int, DeltaState] = {}
        """What each recurrent layer has stored, by the index of the layer; ``[slots, ...]`` both."""
        for shape in dict.fromkeys(config.recurrent.values()):
            layers = [layer for layer, other in config.recurrent.items() if other == shape]
            conv = torch.zeros((len(layers), slots, *shape.conv_shape), dtype=dtype, device=device)
            matrix = torch.zeros((len(layers), slots, *shape.matrix_shape), device=device)
            self.parts += [conv, matrix]
            self.layers |= {layer: DeltaState(conv[place], matrix[place]) for place, layer in enumerate(layers)}

    @property
    def nbytes(self) -> int:
        """Bytes of all that is stored."""
        return sum(part.nbytes for part in self.parts)

    def copy(self, copies: Iterable[StateCopy]) -> None:
        """Copy whole slots, or clear them, one after the other."""
        for source, target in copies:
            for part in self.parts:
                if source is None:
                    part[:, target].zero_()
                else:
                    part[:, target].copy_(part[:, source])
