"""Triton's compiler, which all kernels of our own need; PyTorch's CPU builds come without it."""

from __future__ import annotations

import importlib.util


def has_compiler() -> bool:
    """Whether it is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None
