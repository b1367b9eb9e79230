"""How compressed-tensors says that weights, or inputs, are quantized (``QuantizationArgs``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from inflight.engine.quant.readers.fields import LARGEST_GROUP, chosen, is_group, wrong

_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group")
"""What shares a scale."""


@dataclass(frozen=True)
class Args:
    """How values are quantized."""

    kind: str
    """``int`` or ``float``."""
    bits: int
    symmetric: bool
    """Whether zero is stored as zero."""
    strategy: str
    group: int
    """Columns that share a scale, in the strategies ``group`` and ``block``; else 0."""
    block_rows: int
    """Rows that share a scale, in the strategy ``block``; else 0."""
    dynamic: bool
    """Whether scales follow from the values themselves."""

    def __str__(self) -> str:
        zeros = "" if self.symmetric else ", asymmetric"
        return f"{self.kind} of {self.bits} bits by {self.strategy}{zeros}{', dynamic' if self.dynamic else ''}"


def read(data: Any, field: str) -> Args | None:
    """Read an object of the configuration; ``field``: its name there; None: not quantized. Raises DeploymentError."""
    if data is None:
        return None
    if not isinstance(data, dict):
        raise wrong(field, data, "an object, or null")
    values = {f"{field}.{name}": value for name, value in data.items()}
    size, block = data.get("group_size"), _block(data.get("block_structure"), f"{field}.block_structure")
    if size is not None and not is_group(size) and not (type(size) is int and size == -1):
        raise wrong(f"{field}.group_size", size, f"a positive integer up to {LARGEST_GROUP}, -1, or null")
    inferred = "tensor" if size is None else "channel" if size < 0 else "group"
    strategy = chosen(values, f"{field}.strategy", _STRATEGIES, inferred)
    if strategy in ("group", "tensor_group") and (size or 0) < 1:
        raise wrong(f"{field}.group_size", size, f"a positive integer where strategy is {strategy!r}")
    if (strategy == "block") != (block != (0, 0)):
        raise wrong(
            f"{field}.block_structure", data.get("block_structure"), "given where strategy is 'block', else null"
        )
    if strategy not in ("group", "tensor_group") and (size or 0) > 0:
        raise wrong(f"{field}.group_size", size, f"null where strategy is {strategy!r}")
    return Args(
        kind=chosen(values, f"{field}.type", ("int", "float"), "int"),
        bits=chosen(values, f"{field}.num_bits", range(1, 17), 8),
        symmetric=chosen(values, f"{field}.symmetric", (True, False), True),
        strategy=strategy,
        group=block[1] or max(size or 0, 0),
        block_rows=block[0],
        dynamic=chosen(values, f"{field}.dynamic", (False, True, "local"), False) is not False,
    )


def _block(value: Any, field: str) -> tuple[int, int]:
    """Return rows and columns of a block; zeros: there are none. Older files write ``128x128``."""
    if value is None:
        return 0, 0
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2 and all(re.fullmatch("[0-9]{1,9}", str(size)) for size in sizes):
        rows, columns = map(int, sizes)
        if is_group(rows) and is_group(columns):
            return rows, columns
    raise wrong(field, value, f"two positive integers up to {LARGEST_GROUP}")
