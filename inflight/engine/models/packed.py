"""Linears on a CPU, their weights laid out once as oneDNN's matrix product reads them.

Few rows, as decoding has them, are where it counts: there a general product spends its time on bringing the weight into
order. And each row is added up in the same order however many there are: what a request gets does not depend on what
else is in the batch, to the last bit. Not so bfloat16 with AMX, whose order goes by the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.modules import each_of

_ROWS = 32
"""What oneDNN is told to expect; the layout is the same for any number."""
_FEW_ROWS = 4
"""As which a lone row is computed where oneDNN has another product for it."""
_SHORT_COLUMNS = 1024
"""Up to so many, with AVX2 or newer, oneDNN adds up a lone row in the same order as a row among others."""
_SMALL_WEIGHT = 1 << 19
"""Elements; above, oneDNN takes longer for a lone row than for few."""


class PackedLinear(nn.Module):
    """Computes what the ``nn.Linear`` computes that it was made of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._outputs = linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)
        self._bias = linear.bias
        self._joins_lone_row = linear.in_features > _SHORT_COLUMNS or linear.weight.numel() > _SMALL_WEIGHT

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, rows]`` of ``x [tokens, columns]``."""
        if not len(x):
            return x.new_empty(0, self._outputs)
        if len(x) == 1 and self._joins_lone_row:
            return self._product(functional.pad(x, (0, 0, 0, _FEW_ROWS - 1)))[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def pad_rows(x: Tensor) -> Tensor:
    """Return ``x [rows, ...]`` with zeros behind it, up to one of the numbers of rows that models are run with.

    Those are all up to 16, and eight from there to each double: at most an eighth more than there are. oneDNN compiles
    a product for each number of rows that it meets, and keeps the last 1,024, of half a megabyte each. They lie on the
    heap between the activations of the steps that brought them, and the gaps which those leave are lost to longer ones:
    with a number for each length of a prompt, a process grows to gigabytes.
    """
    rows = len(x)
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    missing = -rows % step
    return functional.pad(x, (*[0, 0] * (x.dim() - 1), 0, missing)) if missing else x


def pack_linears(model: nn.Module) -> None:
    """Pack all plain linears that can be; a weight that is an embedding too stays as it is beside that.

    Packed weights are no parameters: nothing can be loaded into them or read from them.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for name, module in each_of(model, nn.Linear):
        if type(module) is nn.Linear and module.weight.device.type == "cpu" and _pays(module.weight.dtype):
            model.set_submodule(name, PackedLinear(module))


def _pays(dtype: torch.dtype) -> bool:
    """Whether oneDNN has instructions for products of a type; what it has none for it would emulate."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported())
