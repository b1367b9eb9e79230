"""The kernels are compiled for a GPU down to its machine code, which needs none: Triton brings the assembler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
_SHARED_MEMORY = 99 << 10
"""Bytes that a block may have on the smallest GPUs with FP8 (compute capability 8.9; CUDA C++ programming guide)."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90])
def test_they_compile_and_fit(capability: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    program = [sys.executable, "-m", "tests.engine.compile_kernels", str(capability)]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {
        f"_{name}_kernel"
        for name in ("add_rms_norm", "attend", "combine", "find", "gate", "quantize", "store", "total")
    }
    too_large = [line for line in lines if int(line[-1]) > _SHARED_MEMORY]
    assert not too_large
