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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout whose .venv has a pip that writes down what it was asked for; with a file `fails`, it fails."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    pip = tmp_path / ".venv/bin/pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    (pip.parent / "python").symlink_to(sys.executable)
    return tmp_path


def _set_up(checkout: Path, extras: str, **environment: str) -> tuple[str, list[str]]:
    """Return what the set-up says, and the arguments of each call of pip since the last time."""
    command = [sys.executable, str(checkout / "scripts/setup.py"), extras]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    calls = checkout / "calls"
    made = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done.stdout + done.stderr, made


def test_what_is_missing_is_installed_once(checkout: Path) -> None:
    said, [call] = _set_up(checkout, "engine,serve", PIP_FLAGS="--index-url 'http://x y'")
    assert call.endswith("install --constraint constraints.txt --index-url http://x y --editable .[engine,serve]")
    assert "2/2 installing Inflight, PyTorch (" in said
    assert "the Triton server (" in said
    assert _set_up(checkout, "engine,serve") == ("", [])
    assert _set_up(checkout, "serve") == ("", [])


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
    command = ["env", "--default-signal=INT", sys.executable, str(checkout / "scripts/setup.py"), "engine"]
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


@pytest.mark.proof
def test_a_python_that_has_gone_is_replaced(checkout: Path) -> None:
    _set_up(checkout, "engine")
    python = checkout / ".venv/bin/python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    said, _ = _set_up(checkout, "serve", PIP_FLAGS="--no-index")  # of a real pip, which came with it
    assert "1/2 making .venv with Python" in said
