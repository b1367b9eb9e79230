"""The kernels under the compiler's sanitizers: no step reads or writes beside its memory, or does what is undefined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.support.libraries import alone, run_sanitized
from tests.engine.support.native import SETS

FILES = tuple(f"tests/engine/test_native_{name}.py" for name in ("step", "draw", "quantized", "gguf"))
CHOSEN = (
    "what_pytorch_computes or rounded or nan or refused or those_of_the_sort or without_a_token or temperature "
    "or those_of_pytorch or however_many"
)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(f"sanitizers of {name}")) for name in SETS]
)
def test_the_kernels_are_clean(name: str, tmp_path: Path) -> None:
    # By its name, too: a library without these kernels would leave nothing to run, which pytest takes for a failure.
    run_sanitized(tmp_path, (*FILES, "-k", f"({CHOSEN}) and {name}"), alone(name))
