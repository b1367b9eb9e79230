"""The kernels for AMX, without a processor that has it: tiles in plain C++ refuse what a processor would refuse."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.engine.support.libraries import BUILD, ROOT, alone, run_sanitized
from tests.engine.support.native import SETS

TILES = alone("avx2", kernels=Path(__file__).parent / "native/avx2_with_tiles.cpp")
FILES = tuple(f"tests/engine/test_native_{name}.py" for name in ("step", "quantized"))
pytestmark = pytest.mark.proof


@pytest.mark.timeout(1800)
@pytest.mark.skipif("avx2" not in SETS, reason="the stand-in for AMX needs a compiler and AVX2")
def test_products_by_tiles_are_near_pytorchs_in_any_batch_and_stay_in_their_memory(
    tmp_path: Path,
) -> None:
    used = tmp_path / "used"
    chosen = "avx2 and (bits_in_any_step and bfloat16 or quantized or nan and chunks and bfloat16)"
    run_sanitized(tmp_path, (*FILES, "-k", chosen), TILES, {"TILES_USED": str(used)})
    halves, of_bytes = map(int, used.read_text().split())
    assert min(halves, of_bytes) > 0


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
