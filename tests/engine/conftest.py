"""Kernels are interpreted several times as fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

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
