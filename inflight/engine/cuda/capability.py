"""What GPUs have from which compute capability on (CUDA C++ programming guide)."""

from __future__ import annotations

BFLOAT16 = (8, 0)
FP8 = (8, 9)
