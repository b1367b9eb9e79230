"""A library that was compiled once is copied from the cache: for a second checkout, and for the same options again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler $VERSION"; exit; fi
while [ "$1" != -o ]; do shift; done
echo "made by $VERSION" >"$2"
echo call >>"$CALLS"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a compiler that only counts its calls; the file of its calls is returned."""
    program, calls = tmp_path / "c++", tmp_path / "calls"
    program.write_text(COMPILER)
    program.chmod(0o755)
    calls.touch()
    for name, value in {"CXX": program, "CALLS": calls, "VERSION": "12", "XDG_CACHE_HOME": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    return calls


def _build() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "native/build.py"))


def test_a_second_checkout_compiles_nothing(compiler: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first/library.so", tmp_path / "second/library.so"
    assert _build()["build"](first) is None
    calls = compiler.read_text()
    assert calls
    assert _build()["build"](second) is None
    assert compiler.read_text() == calls
    assert second.read_text() == first.read_text() == "made by 12\n"


@pytest.mark.parametrize("change", ["options", "file", "compiler"])
def test_what_else_goes_into_a_library_is_compiled_anew(
    change: str, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, kernels = tmp_path / "library.so", tmp_path / "kernels.cpp"
    kernels.write_text("int a;")
    instead = {"avx2.cpp": kernels}
    assert _build()["build"](library, (), instead) is None
    calls = compiler.read_text()
    if change == "file":
        kernels.write_text("int b;")
    if change == "compiler":
        monkeypatch.setenv("VERSION", "13")
    assert _build()["build"](library, ("-g1",) if change == "options" else (), instead) is None
    assert compiler.read_text() == calls * 2


def test_the_cache_keeps_a_few(compiler: Path, tmp_path: Path) -> None:
    build = _build()
    for number in range(build["_KEPT"] + 3):
        assert build["build"](tmp_path / "library.so", (f"-D{number}",)) is None
    assert len(list((tmp_path / "cache/inflight/native").iterdir())) == build["_KEPT"]


def test_a_cache_that_cannot_be_written_is_no_obstacle(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert _build()["build"](tmp_path / "library.so") is None
    assert (tmp_path / "library.so").read_text() == "made by 12\n"
