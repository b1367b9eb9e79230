"""The kernels for AMX, without a processor that has it: tiles in plain C++ refuse what a processor would refuse."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.support.native import SETS

ROOT = Path(__file__).parents[2]
BUILD = runpy.run_path(str(ROOT / "native/build.py"))
CHOSEN = "avx2 and (bits_in_any_step and bfloat16 or nan or quantized)"
TESTS = (*(f"tests/engine/test_native_{name}.py" for name in ("step", "quantized")), "-k", CHOSEN)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.skipif("avx2" not in SETS, reason="the stand-in for AMX needs a compiler and AVX2")
def test_products_by_tiles_are_near_pytorchs_and_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    library = tmp_path / "libinflight_step.so"
    tiles = Path(__file__).parent / "native/avx2_with_tiles.cpp"
    assert BUILD["build"](library, instead={"avx2.cpp": tiles}) is None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    used = tmp_path / "used"
    environment = os.environ | {"NATIVE_LIBRARY": str(library), "TILES_USED": str(used)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    halves, of_bytes = map(int, used.read_text().split())
    assert min(halves, of_bytes) > 0


@pytest.mark.proof
@pytest.mark.parametrize("compiler", BUILD["_COMPILERS"])
def test_the_kernels_for_amx_are_built_with_its_instructions(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    options = [*BUILD["_FLAGS"], *BUILD["_TARGETS"]["amx.cpp"], "-O1", "-w"]
    assembly = tmp_path / "amx.s"
    subprocess.run([compiler, *options, "-S", str(ROOT / "native/amx.cpp"), "-o", str(assembly)], check=True)
    said = assembly.read_text()
    for name in ("ldtilecfg", "tileloadd", "tdpbf16ps", "tdpbsud", "tilestored", "tilerelease"):
        assert f"\t{name}" in said
