"""What a GPU machine's Python lacks is said in one line, before pytest begins."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/check_gpu_python.py"


def _check(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, str(SCRIPT)], capture_output=True, text=True, check=False)


def test_a_python_with_everything_goes_on() -> None:
    pytest.importorskip("triton")
    done = _check()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_missing_is_named_and_how_it_is_brought() -> None:
    """Python without site-packages has none of it."""
    done = _check("-S", "-I")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "lacks torch, triton, transformers, numpy, safetensors, tokenizers, pydantic, PyYAML" in line
    assert f"make gpu-wheels WHEELS_PYTHON={sys.version_info.major}.{sys.version_info.minor}" in line
    assert "--find-links artifacts/gpu-wheels torch triton " in line


@pytest.mark.proof
def test_nothing_is_asked_for_that_the_tests_do_without() -> None:
    pytest.importorskip("triton")
    folders = {"tests.gpu": ROOT / "tests/gpu", "tests.gpu.support": ROOT / "tests/gpu/support"}
    names = [f"{package}.{path.stem}" for package, folder in folders.items() for path in folder.glob("*.py")]
    code = f"import importlib, sys; [importlib.import_module(name) for name in {['tests.conftest', *names]}]"
    found = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert set(runpy.run_path(str(SCRIPT))["NEEDED"]) - {"xdist"} <= set(found.stdout.split())


def test_make_checks_first() -> None:
    target = (ROOT / "Makefile").read_text().split("\ngpu-test:\n")[1].split("\n\n")[0]
    assert target.index("scripts/check_gpu_python.py") < target.index("pytest")
    assert "$(PACKAGES)" in (ROOT / "Makefile").read_text().split("\ngpu-wheels:\n")[1]
