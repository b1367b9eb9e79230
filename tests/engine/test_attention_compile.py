"""Attention as compiled for five kinds of GPU: all lies in registers, and tensor cores multiply."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.engine.support.compiling import compiled

_SHARED_MEMORY = 99 << 10
"""Bytes that a block may have on the smallest GPUs with FP8 (compute capability 8.9; CUDA C++ programming guide)."""
_LARGEST = 227 << 10
"""The same of compute capability 9.0."""
_REGISTERS = 65_536
"""Of a multiprocessor; a thread gets them by eights."""
_SPILLED = 8
"""Bytes: two registers, by Triton 3.6.0 in decoding from an FP8 cache on compute capability 9.0; 3.7.1 spills none."""


@pytest.mark.proof
@pytest.mark.sweep(most=2)
@pytest.mark.parametrize("capability", [90, 80, 86, 89, 100])
def test_attention(capability: int) -> None:
    kernels: list[dict[str, Any]] = [json.loads(line) for line in compiled("compile_attention", capability)]
    attend = [one for one in kernels if one["kernel"] == "_attend_kernel"]
    assert {one["kernel"] for one in kernels} == {"_attend_kernel", "_combine_kernel", "_plan_kernel"}
    caches = 4 if capability >= 89 else 3
    assert len(attend) == 2 * caches + 1
    for one in kernels:
        assert one["spilled"] <= _SPILLED, one
        large = one["role"] == "common" or (one["role"] == "long" and capability == 90)
        assert one["shared"] <= (_LARGEST if large else _SHARED_MEMORY), one
    for one in attend:
        used = {name for name in ("wgmma", "mma", "tcgen05") if one[name]}
        large = {90: "wgmma", 100: "tcgen05"}.get(capability, "mma")
        expected = set() if one["dtype"] == "torch.float32" else {"mma" if one["role"] == "short" else large}
        assert used == expected, one
        if one["role"] == "short":
            resident = _REGISTERS // (one["warps"] * 32 * -(-one["registers"] // 8) * 8)
            assert resident >= (3 if one["stored"] == "bfloat16" else 2), one
    [plain] = [one for one in attend if one["stored"] == "bfloat16" and one["role"] == "short"]
    assert plain["registers"] <= 144, plain
