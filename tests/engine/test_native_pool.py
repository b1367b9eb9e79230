"""The threads and the memory of the native step, under the sanitizers, where tasks fail and memory is refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.engine.support.libraries import BUILD, ROOT

SOURCES = ROOT / "native"


@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sanitizer", "most"),
    [("address,undefined", (1 << 24) + 5), ("thread", 1 << 16)],  # the word that hands tasks out counts to 2^24 - 1
)
def test_the_pool_and_the_buffers(sanitizer: str, most: int, tmp_path: Path) -> None:
    compiler = BUILD["find_compiler"]()
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    program = tmp_path / "pool"
    options = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    files = [str(ROOT / "tests/engine/native/pool.cpp"), str(SOURCES / "pool.cpp")]
    command = [compiler, *options, "-I", str(SOURCES), *files, "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    refusing = {"ASAN_OPTIONS": "allocator_may_return_null=1", "TSAN_OPTIONS": "allocator_may_return_null=1"}
    done = subprocess.run([program, str(most)], env=os.environ | refusing, capture_output=True, text=True, timeout=240)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this compiler's sanitizer cannot run with the addresses that this system chooses")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
