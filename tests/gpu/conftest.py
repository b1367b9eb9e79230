"""Tests of this folder need a CUDA device and compiled kernels: `make gpu-test`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where they cannot run, and say why."""
    reason = None
    if not torch.cuda.is_available():
        reason = "PyTorch finds no CUDA device"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "TRITON_INTERPRET=1: these are for compiled kernels"
    for item in items:
        if reason and _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
