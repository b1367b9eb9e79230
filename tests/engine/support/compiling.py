"""Runs a program that compiles kernels, by the Triton that is installed or by another version of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
OTHER = "INFLIGHT_TRITON"
"""Environment variable: a folder with another version of Triton, which is then the one that compiles."""


def compiled(program: str, *capabilities: int) -> list[str]:
    """Return the lines that a program of this folder prints, which compiles kernels for compute capabilities."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    if folder := os.environ.get(OTHER):
        environment["PYTHONPATH"] = os.path.abspath(folder)
    command = [sys.executable, "-m", f"tests.engine.support.{program}", *map(str, capabilities)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
