"""The kernels for AMX, without a processor that has it: tiles in plain C++ refuse what a processor would refuse."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.support.libraries import BUILD, ROOT, alone, run_sanitized, run_tests
from tests.engine.support.native import SETS

TILES = alone("avx2", kernels=Path(__file__).parent / "native/avx2_with_tiles.cpp")
FILES = tuple(f"tests/engine/test_native_{name}.py" for name in ("step", "quantized"))
pytestmark = pytest.mark.proof
stands_in = pytest.mark.skipif("avx2" not in SETS, reason="the stand-in for AMX needs a compiler and AVX2")


@pytest.mark.timeout(900)
@stands_in
def test_products_by_tiles_are_near_pytorchs_and_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    library, used = tmp_path / "libinflight_step.so", tmp_path / "used"
    assert BUILD["build"](library, instead=TILES) is None
    chosen = "avx2 and (bits_in_any_step and bfloat16 or quantized)"
    run_tests(library, (*FILES, "-k", chosen), {"TILES_USED": str(used)})
    halves, of_bytes = map(int, used.read_text().split())
    assert min(halves, of_bytes) > 0


@pytest.mark.timeout(900)
@stands_in
def test_products_by_tiles_stay_in_their_memory(tmp_path: Path) -> None:
    run_sanitized(tmp_path, (*FILES, "-k", "avx2 and nan and (chunks and bfloat16 or W8A8)"), TILES)


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_kernels_for_amx_are_built_with_its_instructions(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    options = [*BUILD["_FLAGS"], *BUILD["_TARGETS"]["amx.cpp"]]
    assembly = tmp_path / "amx.s"
    subprocess.run([compiler, *options, "-S", str(ROOT / "native/amx.cpp"), "-o", str(assembly)], check=True)
    said = " ".join(assembly.read_text().split())
    for instruction in (
        "ldtilecfg ",
        "tileloadd (",
        "tdpbf16ps %tmm5, %tmm4, %tmm0",  # the weights come first in the compilers' notation, and last in Intel's
        "tdpbsud %tmm6, %tmm4, %tmm3",
        "tilestored %tmm0",
        "tilerelease",
    ):
        assert instruction in said
