"""Tests of the kernels in a process of their own, with another library, such as one under the sanitizers."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BUILD = runpy.run_path(str(ROOT / "native/build.py"))
OPTIONS = (
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1"),
    "-fno-sanitize=null,object-size",  # the address sanitizer finds these; to compile their checks takes a fifth of all
)


def alone(*names: str, kernels: Path | None = None) -> dict[str, Path]:
    """Return which files to compile in place of the sources for a library of some instruction sets.

    ``kernels``: the file of the one that is named, if it is not that of the sources.
    """
    instead = dict.fromkeys(BUILD["_TARGETS"], ROOT / "tests/engine/native/absent.cpp")
    for name in names:
        del instead[f"{name}.cpp"]
    return instead | ({f"{names[0]}.cpp": kernels} if kernels else {})


def run_tests(library: Path, tests: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run tests with a library and more variables of the environment, and fail if they do; ``tests`` are pytest's."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | variables | {"NATIVE_LIBRARY": str(library)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def run_sanitized(folder: Path, tests: Sequence[str], instead: Mapping[str, Path]) -> None:
    """Build the library to ``folder`` with the sanitizers, and run tests with it.

    Args:
        folder: where the library goes.
        tests: arguments of pytest.
        instead: files that are compiled in place of the kernels' own, by their names.
    """
    compiler = BUILD["find_compiler"]()
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    library = folder / "libinflight_step.so"
    assert BUILD["build"](library, OPTIONS, instead) is None
    runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    variables = {
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own are not ours
        "OMP_NUM_THREADS": "1",
    }
    run_tests(library, tests, variables)
