"""The types of tensors in GGUF files: how many values a block has, and how many bytes it takes.

Numbers and sizes: ``ggml_type`` and the blocks of https://github.com/ggml-org/ggml (ggml.h, ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class TensorType(NamedTuple):
    """How values are stored."""

    name: str
    block: int
    """Values that are stored together."""
    size: int
    """Bytes that they take."""

    def bytes_of(self, values: int) -> int:
        """Return the bytes of so many values, which are whole blocks."""
        return values // self.block * self.size


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
    42: TensorType("Q2_0", 64, 18),
}
"""By GGUF's numbers."""

FLOATS = ("F32", "F16", "BF16")
"""The types of floats that are served as they are."""


class PackedType(NamedTuple):
    """What a CPU's native step makes of blocks: integers, in groups with a scale, and maybe a minimum."""

    bits: int
    """Of an integer."""
    group: int
    """Integers of a group."""
    minimums: bool = False
    scale_bits: int = 32
    """Of a scale, and of a minimum."""

    @property
    def bits_of_weight(self) -> float:
        """Bits that a weight takes, with its share of the group's scale and minimum."""
        return self.bits + self.scale_bits * (1 + self.minimums) / self.group


def packed_together(types: Collection[PackedType]) -> PackedType:
    """Return what the parts of one product are packed as: the most bits among them, the shortest groups.

    If any has minimums, all get them; then integers that had none may be signed, and take eight bits.
    """
    return PackedType(
        max(one.bits for one in types) if len({one.minimums for one in types}) == 1 else 8,
        min(one.group for one in types),
        any(one.minimums for one in types),
        max(one.scale_bits for one in types),
    )


QUANTIZED: dict[str, PackedType] = {
    "Q4_0": PackedType(4, 32),
    "Q4_1": PackedType(4, 32, minimums=True),
    "Q5_0": PackedType(8, 32),
    "Q5_1": PackedType(8, 32, minimums=True),
    "Q8_0": PackedType(8, 32),
    "Q2_K": PackedType(4, 16, minimums=True),
    "Q3_K": PackedType(4, 16),
    "Q4_K": PackedType(4, 32, minimums=True),
    "Q5_K": PackedType(8, 32, minimums=True),
    "Q6_K": PackedType(8, 16),
    "IQ4_NL": PackedType(8, 32),
    "IQ4_XS": PackedType(8, 32),
    "MXFP4": PackedType(4, 32, scale_bits=8),
}
"""The quantized types that are decoded, by name."""
SERVED = (*FLOATS, *QUANTIZED)
"""The names of the types of tensors that are served."""
BLOCKS = {kind.name: kind for kind in TENSOR_TYPES.values()}
"""All types of tensors, by name."""
