"""The wheel in an environment of its own: its commands work in an empty folder, and write into that alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

from inflight.engine.native.bindings import LIBRARY, instruction_sets
from inflight.resources import DEMO, VERSION
from inflight.serve.server import free_ports

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel; what it depends on is lent by the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True)
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = str(environment / "bin/python")
    [file] = folder.glob("inflight-*.whl")
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", str(file)], check=True)
    # Its editable Inflight is not lent: it is named by a .pth file, and only those of a site's own folder are read.
    (_site(environment) / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """Return the folder that the commands run in."""
    return tmp_path


def _site(environment: Path) -> Path:
    return environment / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def _data(environment: Path) -> dict[Path, int]:
    """Return the wheel's files that are not code, each with the time of its last change."""
    files = (_site(environment) / "inflight/_data").rglob("*")
    return {file: file.stat().st_mtime_ns for file in files if "__pycache__" not in file.parts and file.is_file()}


def _run(environment: Path, folder: Path, *words: str) -> str:
    command = [str(environment / "bin/inflight"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.proof
def test_wheel_is_what_runs(installed: Path, empty: Path) -> None:
    assert _run(installed, empty, "--version") == f"inflight {VERSION}\n"
    where = [str(installed / "bin/python"), "-c", "import inflight.resources as r; print(r.__file__, r.CHECKOUT)"]
    said = subprocess.run(where, cwd=empty, capture_output=True, text=True, check=True).stdout
    assert said == f"{_site(installed) / 'inflight/resources.py'} None\n"
    assert _data(installed)


@pytest.mark.proof
def test_wheel_has_every_resource(installed: Path) -> None:
    names = "BACKENDS MODEL_REPOSITORY DEMO SCENARIOS UPSTREAM_PREPROCESSING GPUS CALIBRATION_DATA HELD_OUT_DATA "
    names += "CALIBRATION_PROSE HELD_OUT_PROSE"
    program = f"import inflight.resources as r; print([n for n in {names.split()} if not getattr(r, n).exists()])"
    command = [str(installed / "bin/python"), "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.proof
def test_wheel_has_the_native_step(installed: Path, empty: Path) -> None:
    if not LIBRARY.is_file():
        pytest.skip("it was not built here")
    program = "from inflight.engine.native import bindings as b; print(b.LIBRARY, b.instruction_sets())"
    command = [str(installed / "bin/python"), "-c", program]
    said = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=True).stdout
    assert said == f"{_site(installed) / 'inflight/engine/native' / LIBRARY.name} {instruction_sets()}\n"


@pytest.mark.proof
def test_wheel_plans(installed: Path, empty: Path) -> None:
    plan = json.loads(_run(installed, empty, "plan", str(DEMO / "model"), "--gpu", "l4", "--json", "-"))
    assert plan["plans"]


@pytest.mark.proof
def test_wheel_serves_the_demo(installed: Path, empty: Path) -> None:
    before, (http, grpc, metrics, gateway) = _data(installed), map(str, free_ports(4))
    command = [str(installed / "bin/inflight"), "serve", "--http-port", http, "--grpc-port", grpc]
    command += ["--metrics-port", metrics, "--gateway-port", gateway]
    serving = subprocess.Popen(command, cwd=empty, stderr=subprocess.PIPE, text=True)
    assert serving.stderr
    try:
        said = ""
        while "Ctrl-C stops it" not in said:
            line = serving.stderr.readline()
            assert line, said
            said += line
        body = {"text_input": "What is in-flight batching?", "max_tokens": 32}
        reply = httpx.post(f"http://127.0.0.1:{http}/v2/models/ensemble/generate", json=body, timeout=60)
        assert "batch" in reply.json()["text_output"]
        models = httpx.get(f"http://127.0.0.1:{gateway}/v1/models", timeout=60).json()
        assert [model["id"] for model in models["data"]] == ["demo"]
    finally:
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0
    assert not os.listdir(empty)
    assert _data(installed) == before


@pytest.mark.proof
def test_wheel_runs_a_load_test(installed: Path, empty: Path) -> None:
    _run(installed, empty, *"load smoke --serve deployments/demo --duration-scale 0.2 --output result".split())
    assert (empty / "result/report.html").is_file()
    assert json.loads((empty / "result/summary.json").read_text())["commit"] == VERSION
    assert os.listdir(empty) == ["result"]
