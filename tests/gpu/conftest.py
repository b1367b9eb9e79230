"""Tests of this folder need a CUDA device and compiled kernels: `make gpu-test`.

GPU_TESTS=dry runs, on a CPU, what Triton's interpreter can run of them, at small sizes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gpu.support.device import DRY

_HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Have a CUDA error end the process that it happened in."""
    from tests.gpu.support import sticky

    if torch.cuda.is_available():
        config.pluginmanager.register(sticky)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where they cannot run, and say why."""
    for item in items:
        if _HERE in item.path.parents and (reason := _why_not(item)):
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(item: pytest.Item) -> str | None:
    if DRY:
        return None if item.get_closest_marker("dry") else "tests/engine has it for the interpreter"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1: these are for compiled kernels"
    return None
