"""What PyTorch's operations do to the tensors that they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

READ_BY_HOST = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "bincount"}
"""Operations whose results the host waits for."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear"}
"""Operations that use a stream's workspace."""


def real(values: Any) -> Any:
    """Return what computes in the place of tensors of the device."""
    return tree_map(lambda one: getattr(one, "held", one), values)


def is_view(func: Any) -> bool:
    """Whether an operation computes nothing."""
    aliases = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def arguments_of(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, bool]]:
    """Return the tensors that an operation touches, and whether it writes them."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        values = value if isinstance(value, (list, tuple)) else (value,)  # a schema has no lists of lists of tensors
        found += [(one, writes) for one in values if isinstance(one, torch.Tensor)]
    return found
