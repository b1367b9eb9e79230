"""Rows of a Gated DeltaNet's input projections, which checkpoints may have by heads, and the model has by kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from inflight.engine.expert_stacks import ExpertStack
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.gated_delta_net import GatedDeltaNet, rows_by_kind
from inflight.engine.models.naming import CheckpointNames
from inflight.errors import DeploymentError

_OF_INPUTS = ("pre_quant_scale", "input_scale", "group_index")
"""What a quantized linear has for its inputs, which no order of rows concerns."""


class OrderedRows(NamedTuple):
    """A tensor whose rows the checkpoint has in another order."""

    tensor: Tensor
    order: Tensor
    """Where each of its rows is there."""

    @property
    def shape(self) -> torch.Size:
        """Of the checkpoint's tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the checkpoint's tensor."""
        return self.tensor.dtype

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy the checkpoint's tensor, which is called ``name``."""
        self.tensor.copy_(tensor[self.order])


def ordered_rows(
    model: DecoderModel, naming: CheckpointNames, targets: Mapping[str, Tensor | ExpertStack | OrderedRows]
) -> dict[str, OrderedRows]:
    """Return, of the ``targets``, those whose rows the checkpoint has in another order.

    Raises:
        DeploymentError: several rows of a quantized weight share a row of ``targets``, and lie apart in the model.
    """
    ordered = dict[str, OrderedRows]()
    for layer, one in ((name, one) for name, one in model.named_modules() if isinstance(one, GatedDeltaNet)):
        if not one.config.interleaved:
            continue
        for module, order in zip(("in_proj_qkvz", "in_proj_ba"), rows_by_kind(one.config), strict=True):
            above = naming.of(f"{layer}.{module}") + "."
            for name, target in targets.items():
                own = name.startswith(above) and name.removeprefix(above) not in _OF_INPUTS
                if own and isinstance(target, Tensor) and target.dim() and len(target) > 1:
                    ordered[name] = OrderedRows(target, _order_of(name, len(target), order))
    return ordered


def _order_of(name: str, count: int, order: Tensor) -> Tensor:
    """Return where each of the ``count`` rows of a tensor is, each of which may be of several rows of the weight.

    Two rows of INT4 share a byte, and the rows of a block share a scale: they must lie together in both orders.

    Raises:
        DeploymentError: they do not.
    """
    shared = len(order) // count
    if len(order) == shared * count:
        runs = order.view(count, shared)
        places = runs[:, 0] // shared
        if torch.equal(runs, places[:, None] * shared + torch.arange(shared)):
            return places
    raise DeploymentError(
        f"checkpoint: tensor {name} has {count} rows for {len(order)} of the weight, and they do not end where heads "
        "end; this is not supported"
    )
