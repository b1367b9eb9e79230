"""The kernels are compiled for a GPU down to its machine code, which needs none: Triton brings the assembler."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.engine.support.compiling import compiled

_SHARED_MEMORY = {89: 99 << 10, 90: 227 << 10}
"""Bytes that a block may have, by compute capability (CUDA C++ programming guide)."""

_NAMES = (
    "add_rms_norm", "attend", "choose", "combine", "deal", "expert", "find", "gate", "mix", "plan", "quantize", "store",
    "tiles", "total",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.sweep(most=1)
@pytest.mark.parametrize("capability", sorted(_SHARED_MEMORY, reverse=True))
def test_they_compile_and_fit(capability: int) -> None:
    lines = [line.split() for line in compiled("compile_kernels", capability)]
    assert {line[0] for line in lines} == {f"_{name}_kernel" for name in _NAMES}
    too_large = [line for line in lines if int(line[-1]) > _SHARED_MEMORY[capability]]
    assert not too_large
