"""Writes contract tensors as the Triton clients' inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.utils import triton_to_np_dtype

from inflight.contract import STAGES


def grpc_inputs(model: str, values: dict[str, Any]) -> list[InferInput]:
    """Return inputs with the contract's types; a value becomes one row, unless it is an array (kept as it is)."""
    kinds = {tensor.name: tensor.dtype for tensor in STAGES[model][0]}
    inputs = []
    for name, value in values.items():
        kind = kinds.get(name, "INT32")
        array = value if isinstance(value, np.ndarray) else _row(value, kind)
        tensor = InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def _row(value: Any, kind: str) -> np.ndarray:
    items = value if isinstance(value, list) else [value]
    if kind == "BYTES":
        return np.array([[item if isinstance(item, bytes) else item.encode() for item in items]], object)
    return np.array([items], triton_to_np_dtype(kind))
