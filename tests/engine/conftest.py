"""Kernels are interpreted several times as fast, and multiplied as a GPU does where a test asks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def _language_is_patched_once_a_launch() -> Iterator[None]:
    """Have Triton's interpreter replace the language's functions once, not at each call of one kernel's function."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    patched: set[frozenset[int]] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def patch_once(function: Any) -> Any:
        modules = frozenset(
            id(value) for value in function.__globals__.values() if value in (interpreter.tl, interpreter.tl.core)
        )
        if modules in patched:
            return None
        patched.add(modules)
        return patch(function)

    def launch_anew(self: Any, *args: Any, **settings: Any) -> Any:
        patched.clear()
        return launch(self, *args, **settings)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(interpreter, "_patch_lang", patch_once)
        changed.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield


@pytest.fixture
def rows_are_multiplied_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter multiply tiles as a GPU does: a row's result does not depend on its place in the tile.

    It multiplies with numpy, whose OpenBLAS adds up some rows of a matrix in another order than the rest, on AVX2 and
    on AMD's processors. The kernels choose the tiles and their order, and these are what the test is about. bfloat16,
    whose bits it holds in integers, is multiplied as a GPU does: in float32.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    bfloat16 = interpreter.tl.bfloat16

    def numbers(x: Any) -> np.ndarray:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == bfloat16 else x.data

    def create_dot(_: object, a: Any, b: Any, total: Any, *__: object) -> Any:
        result = total.data.copy()
        for column, row in zip(numbers(a).T, numbers(b), strict=True):
            result += np.multiply.outer(column, row, dtype=result.dtype)
        return interpreter.TensorHandle(result, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
