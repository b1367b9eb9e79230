"""What is installed into NVIDIA's image: what is missing there, and nothing in place of what is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = '''
"""A pip that has what `there` lists, writes down what it is asked to install, and fails at the argument in `fails`."""

import json, pathlib, sys

here = pathlib.Path(__file__).parents[1]
arguments = sys.argv[2:]
if arguments[0] == "list":
    print((here / "there").read_text())
elif "--dry-run" in arguments:
    found = [line.split("==") for line in (here / "closure").read_text().split()]
    print(json.dumps({"install": [{"metadata": {"name": name, "version": version}} for name, version in found]}))
else:
    if "--constraint" in arguments:
        constraints = pathlib.Path(arguments[arguments.index("--constraint") + 1])
        (here / "constraints").write_text(constraints.read_text())
    with (here / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\\n")
    fails = here / "fails"
    sys.exit(fails.exists() and fails.read_text() in arguments)
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout beside a package `pip` of its own, in an environment that has some packages."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup_image.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip/__init__.py").touch()
    (tmp_path / "pip/__main__.py").write_text(PIP)
    (tmp_path / "there").write_text(
        "numpy==1.26.4\nHTTPX==0.27.2\npydantic_core==2.41.5\nprotobuf==7.36.2\ntorch==2.10.0a0+nv"
    )
    return tmp_path


def _install(checkout: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run the script; return how it ended, and the arguments of each call of `pip install`."""
    command = [sys.executable, str(checkout / "scripts/setup_image.py")]
    found = os.environ | {"PYTHONPATH": str(checkout), "PIP_FLAGS": ""} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=found, cwd=checkout)
    calls = checkout / "calls"
    return done, [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []


def test_what_is_missing_comes_at_the_tested_versions_and_what_is_there_stays(checkout: Path) -> None:
    done, [missing, itself] = _install(checkout, PIP_FLAGS="--index-url 'http://x y'")
    assert done.returncode == 0
    assert missing[:4] == ["install", "--index-url", "http://x y", "--constraint"]
    assert {"tritonclient[grpc]", "opentelemetry-sdk", "typer", "safetensors"} <= set(missing)
    assert not {"numpy", "httpx", "torch"} & set(missing)
    assert itself[-3:] == ["--no-deps", "--editable", str(checkout)]
    constraints = (checkout / "constraints").read_text().splitlines()
    assert set((checkout / "there").read_text().splitlines()) <= set(constraints)
    tested = [line.partition("==")[0].lower() for line in constraints]
    assert "typer" in tested
    assert tested.count("httpx") == tested.count("pydantic_core") == tested.count("protobuf") == 1


def test_what_does_not_allow_what_is_there_is_installed_beside_it(checkout: Path) -> None:
    (checkout / "fails").write_text("--constraint")
    (checkout / "closure").write_text(
        "typer==0.29.2 tritonclient==2.73.0 protobuf==6.33.6 numpy==1.26.4 pydantic-core==2.50.4"
    )
    done, [_, missing, itself] = _install(checkout)
    assert done.returncode == 0
    assert missing == ["install", "--no-deps", "typer==0.29.2", "tritonclient==2.73.0"]
    assert "--editable" in itself


def test_what_cannot_be_installed_is_told(checkout: Path) -> None:
    (checkout / "fails").write_text("--no-deps")
    done, _ = _install(checkout)
    assert done.returncode == 1
    assert done.stderr.endswith("Inflight is not installed: pip says above why\n")
