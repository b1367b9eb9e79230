"""What `inflight serve` makes of the directory that it is given: a deployment, a checkpoint, or one clear line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inflight import resources
from inflight.cli import app
from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve import command, installation
from inflight.settings.deployment import Deployment


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models of the deployments that were to be served; no server is started."""
    models: list[Path] = []

    def serve(_directory: Path, deployment: Deployment, *_others: object) -> None:
        models.append(deployment.model)

    monkeypatch.setattr(command, "_serve", serve)
    return models


def _said(*words: str) -> str:
    done = CliRunner().invoke(app, ["serve", *words])
    assert done.exit_code == 1
    assert done.output.count("\n") == 1, done.output
    return done.output


@pytest.mark.parametrize(
    "words",
    [[], [str(DEMO)], ["deployments/demo"], [str(DEMO / "model")], ["--model", str(DEMO / "model")]],
    ids=["nothing", "a deployment", "the demo's name", "a checkpoint", "--model"],
)
def test_what_is_served(words: list[str], served: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["serve", *words]).exit_code == 0
    assert served == [DEMO / "model"]


@pytest.mark.parametrize(
    "words", [["{}/one.gguf"], ["{}"], ["--model", "{}"]], ids=["a file", "its directory", "--model"]
)
def test_a_gguf_file_is_served(words: list[str], served: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "one.gguf"
    file.write_bytes(b"GGUF")
    assert CliRunner().invoke(app, ["serve", *(word.format(tmp_path) for word in words)]).exit_code == 0
    assert served == [file]
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "it has several models, one.gguf, other.gguf; name the one to serve" in _said(str(tmp_path))
    assert f"there is no file {tmp_path / 'on.gguf'} (did you mean 'one.gguf'?)" in _said(str(tmp_path / "on.gguf"))


def test_a_directory_of_neither_kind(served: list[Path], tmp_path: Path) -> None:
    assert f"{tmp_path} has no deployment.yaml of a deployment and no config.json" in _said(str(tmp_path))
    assert "give a deployment directory or --model, not both" in _said(str(DEMO), "--model", str(DEMO / "model"))
    assert f"{tmp_path / 'x'} is not a directory\n" in _said(str(tmp_path / "x"))
    assert not served


def test_what_serving_lacks_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "DEFAULT_INSTALLATION", Path("nowhere"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(DeploymentError, match="no Triton server: `make setup EXTRAS=engine,serve`"):
        installation.find_installation()
    with pytest.raises(DeploymentError, match="needs PyTorch: `make setup EXTRAS=engine`"):
        installation.require_engine("pytorch")
    installation.require_engine("trtllm")


def test_a_wheel_is_told_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "CHECKOUT", None)
    assert resources.how_to_install("engine", "serve") == "pip install 'inflight[engine,serve]'"
