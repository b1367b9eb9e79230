"""What the Makefile's verbs install: what they need, once, and again where the pins have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
echo "$@" >> calls
echo "WARNING: Location 'file:///nowhere/numpy/' is ignored: it is neither a file nor a directory." >&2
echo "WARNING: something else" >&2
test ! -e interrupted || kill -INT $PPID
test ! -e fails
"""
COMPILER = """#!/bin/sh
here=$(dirname "$0")
echo "$@" >> "$here/compiled"
while [ $# -gt 0 ]; do
    case "$1" in
        -o) shift; out=$1 ;;
        -DINFLIGHT_SOURCES=*) text="$text $1" ;;
        *.o) text="$text $(cat "$1")" ;;
    esac
    shift
done
echo "$text" > "$out"
if [ -e "$here/breaks" ]; then echo "no such option" >&2; exit 1; fi
"""
"""Writes down what it is asked for, and makes a library with the digest of the sources."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with a pip and a compiler that write down what they are asked for.

    With a file `fails` the one fails, with `breaks` the other.
    """
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "native", tmp_path / "native")
    pip = tmp_path / ".venv/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    (tmp_path / "compiler").write_text(COMPILER)
    (tmp_path / "compiler").chmod(0o755)
    (pip.parent / "python").symlink_to(sys.executable)
    return tmp_path


def _set_up(checkout: Path, extras: str, **environment: str) -> tuple[str, list[str]]:
    """Return what the set-up says, and the arguments of each call of pip since the last time."""
    command = [sys.executable, str(checkout / "scripts/setup.py"), extras]
    compiler = {"CXX": str(checkout / "compiler"), "XDG_CACHE_HOME": str(checkout / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | compiler | environment)
    calls = checkout / "calls"
    made = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done.stdout + done.stderr, made


def test_what_is_missing_is_installed_once(checkout: Path) -> None:
    said, [call] = _set_up(checkout, "engine,serve", PIP_FLAGS="--index-url 'http://x y'")
    assert call.endswith(
        "install --index-url http://x y --no-compile --constraint constraints.txt --editable .[engine,serve]"
    )
    assert "2/2 installing Inflight, PyTorch (" in said
    assert "the Triton server (" in said
    assert _set_up(checkout, "engine,serve") == ("", [])
    assert _set_up(checkout, "serve") == ("", [])


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="with a GPU there is no such hint")
@pytest.mark.parametrize(("flags", "hinted"), [("", True), (" ", True), ("--extra-index-url http://x", False)])
def test_pip_flags_are_hinted_at_where_none_are_given(checkout: Path, flags: str, hinted: bool) -> None:
    said, [_] = _set_up(checkout, "engine", PIP_FLAGS=flags)
    assert ("PIP_FLAGS with the index of PyTorch for CPUs" in said) == hinted


def test_what_pip_says_is_shown_but_for_links_that_lead_nowhere(checkout: Path) -> None:
    said, _ = _set_up(checkout, "load")
    assert "WARNING: something else\n" in said
    assert "Location" not in said


def test_extras_are_added_and_new_pins_are_everyones(checkout: Path) -> None:
    _set_up(checkout, "engine")
    _, [call] = _set_up(checkout, "dev")
    assert call.endswith(".[dev,engine]")
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# another version\n")
    _, [call] = _set_up(checkout, "engine")
    assert call.endswith(".[dev,engine]")


def test_what_failed_is_tried_again(checkout: Path) -> None:
    (checkout / "fails").touch()
    said, [_] = _set_up(checkout, "engine")
    assert "pip could not install what is needed" in said
    (checkout / "fails").unlink()
    _, [_] = _set_up(checkout, "engine")
    assert _set_up(checkout, "engine") == ("", [])


def test_pins_that_were_installed_in_part_are_not_taken_for_those_before(checkout: Path) -> None:
    _set_up(checkout, "engine")
    pins = (checkout / "constraints.txt").read_text()
    (checkout / "constraints.txt").write_text(pins + "# another version\n")
    (checkout / "fails").touch()
    _set_up(checkout, "engine,serve")
    (checkout / "fails").unlink()
    (checkout / "constraints.txt").write_text(pins)
    _, [call] = _set_up(checkout, "engine")
    assert call.endswith(".[engine]"), "what has failed is not everyone's"


def test_ctrl_c_is_no_traceback_and_what_it_broke_off_is_done_again(checkout: Path) -> None:
    (checkout / "interrupted").touch()
    command = [
        "env",
        "--default-signal=INT",
        "CXX=nothing",
        sys.executable,
        str(checkout / "scripts/setup.py"),
        "engine",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    (checkout / "interrupted").unlink()
    (checkout / "calls").unlink()
    _, [_] = _set_up(checkout, "engine")


def test_what_cannot_be_done_is_one_line(checkout: Path) -> None:
    said, calls = _set_up(checkout, "engine", PIP_FLAGS="--index-url 'http://x")
    assert said.splitlines()[-1] == """PIP_FLAGS is "--index-url 'http://x": No closing quotation"""
    assert not calls
    (checkout / ".venv/bin/pip").chmod(0o644)
    assert _set_up(checkout, "engine")[0].splitlines()[-1] == f"{checkout}/.venv/bin/pip: Permission denied"
    shutil.rmtree(checkout / ".venv")
    (checkout / ".venv").touch()
    said, _ = _set_up(checkout, "engine")
    assert said.splitlines()[-1] == ".venv could not be made; the code of python -m venv is 1"


def test_the_kernels_are_compiled_once_and_again_where_their_sources_have_changed(checkout: Path) -> None:
    compiled = checkout / "compiled"
    said, _ = _set_up(checkout, "load")
    assert "compiling" not in said
    assert "building the kernels" in _set_up(checkout, "engine")[0]
    assert (checkout / "inflight/engine/native/libinflight_step.so").exists()
    assert "-mavx512bf16" in compiled.read_text()
    assert "compiling" not in _set_up(checkout, "engine")[0]
    with (checkout / "native/pool.cpp").open("a") as file:
        file.write("// another line\n")
    assert "building the kernels" in _set_up(checkout, "engine")[0]


def test_pytorch_computes_where_the_kernels_cannot_be_compiled(checkout: Path) -> None:
    said, _ = _set_up(checkout, "engine", CXX="nothing")
    assert "no C++ compiler is here" in said
    assert _set_up(checkout, "engine", CXX="nothing") == ("", [])
    (checkout / "breaks").touch()
    said, _ = _set_up(checkout, "engine")
    assert "PyTorch will compute instead" in said
    assert "no such option" in said
    assert not list((checkout / "inflight/engine/native").glob("*"))


@pytest.mark.proof
def test_a_python_that_has_gone_is_replaced(checkout: Path) -> None:
    _set_up(checkout, "engine")
    python = checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    said, _ = _set_up(checkout, "serve", PIP_FLAGS="--no-index")  # of a real pip, which came with it
    assert "1/2 making .venv with Python" in said
