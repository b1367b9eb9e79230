"""The kernels under the compiler's sanitizers: no step reads or writes beside its memory, or does what is undefined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.engine.support.libraries import alone, run_sanitized
from tests.engine.support.native import SETS

FILES = tuple(f"tests/engine/test_native_{name}.py" for name in ("step", "draw", "quantized", "gguf"))
CHOSEN = (
    "what_pytorch_computes or pytorch_stores or rounded or nan or refused or those_of_the_sort "
    "or without_a_token or temperature or those_of_pytorch or however_many"
)

CHECKED = SETS if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else SETS[:1]
"""`make check` looks at the richest instruction set of its machine, `make release` at all: each takes minutes."""
pytestmark = [pytest.mark.proof]


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SETS, reason="the native step was not built")
def test_the_kernels_are_clean(tmp_path: Path) -> None:
    """The instruction sets are in one library, and the tests' cases are shared out to them."""
    run_sanitized(tmp_path, (*FILES, "-k", CHOSEN), alone(*CHECKED))
