"""Matrix products in transformers' code that are not ``nn.Linear``, made such that ``pack_linears`` finds them.

Two kinds occur: GPT-2's ``Conv1D``, which is a linear with a transposed weight, and routers, which multiply by a
parameter of their own. A router's last bit may choose another expert: its product must not depend on the rows beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.packed import PackedLinear


def replace_conv1d(model: nn.Module) -> None:
    """Put an ``nn.Linear`` in place of each ``Conv1D`` of a loaded model."""
    from transformers.pytorch_utils import Conv1D

    for name in [name for name, module in model.named_modules() if isinstance(module, Conv1D)]:
        source = model.get_submodule(name)
        columns, rows = source.weight.shape
        linear = nn.Linear(columns, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(source.weight.data.t().contiguous(), requires_grad=False)
        linear.bias = source.bias
        model.set_submodule(name, linear)


class RowWeight(Tensor):
    """A weight whose products, as ``functional.linear`` computes them, do not depend on the number of rows."""

    packed: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> RowWeight:
        """Return ``weight [rows, columns]``, float32, on a CPU, as such."""
        made = weight.detach().as_subclass(cls)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        made.packed = PackedLinear(linear)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Sequence[Any], args: Any = (), kwargs: Any = None) -> Any:
        """Compute the products so, and all else as with any tensor."""
        kwargs = kwargs or {}
        if func is functional.linear and type(args[1]) is cls and hasattr(args[1], "packed"):
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            product = args[1].packed(args[0])
            return product if bias is None else product + bias
        wanted = (*args[1:], *kwargs.values())
        if func is Tensor.float or (func in (Tensor.type, Tensor.to) and torch.float32 in wanted):
            return args[0]  # it is float32, and would lose its packed form
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def pack_parameters(model: nn.Module) -> None:
    """Make the matrices of float32 that modules hold beside linears and embeddings such weights.

    Only a CPU's products of float32 can be made so.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            continue
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() == 2 and weight.dtype == torch.float32 and weight.device.type == "cpu":
                delattr(module, name)
                setattr(module, name, RowWeight.of(weight))
