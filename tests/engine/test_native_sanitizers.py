"""The kernels under the compiler's sanitizers: no step reads or writes beside its memory, or does what is undefined."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = runpy.run_path(str(ROOT / "native/build.py"))
OPTIONS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1")

FILES = tuple(f"tests/engine/test_native_{name}.py" for name in ("step", "draw", "quantized"))
CHOSEN = (
    "what_pytorch_computes or rounded or nan or refused or those_of_the_sort or without_a_token or temperature "
    "or those_of_pytorch or however_many"
)
TESTS = (*FILES, "-k", CHOSEN)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_the_kernels_are_clean(tmp_path: Path) -> None:
    compiler = BUILD["find_compiler"]()
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    library = tmp_path / "libinflight_step.so"
    assert BUILD["build"](library, OPTIONS) is None
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "NATIVE_LIBRARY": str(library),
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are not ours
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
