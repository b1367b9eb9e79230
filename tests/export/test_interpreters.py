"""Two interpreters in one build: Inflight's quantizes and verifies, TensorRT-LLM's compiles."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from inflight.errors import DeploymentError
from inflight.export import interpreters
from inflight.export.build.request import BuildRequest
from inflight.export.interpreters import find_tensorrt_llm
from inflight.export.plan.plan import PlanRequest
from inflight.machine import Machine, Versions
from inflight.manifest import read_manifest
from inflight.settings.deployment import load_deployment
from tests.export.support.building import LENIENT, run
from tests.export.support.compiling import FAKES, install_tools

HOPPER = Machine(Versions(inflight="0", torch="2"), ("NVIDIA H100 80GB HBM3",), ((9, 0),))
"""A GPU, and an interpreter of our own without TensorRT-LLM."""


def environment(directory: Path, version: str | None = "1.2.1") -> Path:
    """Lay out an environment as the image has it, with this version of TensorRT-LLM; return its ``python3``."""
    python = directory / "bin/python3"
    python.parent.mkdir(parents=True)
    told = json.dumps({"tensorrt_llm": version, "tensorrt": version and "10.14.1"})
    python.write_text(f'#!/bin/sh\nif [ "$2" = -c ]; then echo \'{told}\'; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    if version is not None:
        (python.parent / "trtllm-build").symlink_to(FAKES / "bin/trtllm-build")
    return python


@pytest.fixture(autouse=True)
def _nothing_else_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "detect", lambda: HOPPER)
    monkeypatch.setattr(interpreters, "IMAGES", tmp_path / "no image")
    monkeypatch.setenv("PATH", f"{environment(tmp_path / 'plain', None).parent}:/usr/bin:/bin")


def test_the_first_python_on_the_path_that_has_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_tensorrt_llm() is None
    python = environment(tmp_path / "image")
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{python.parent}")
    found = find_tensorrt_llm()
    assert found is not None
    assert (found.python, found.tensorrt_llm, found.tensorrt) == (python, "1.2.1", "10.14.1")
    assert found.program("trtllm-build") == str(python.with_name("trtllm-build"))
    assert found.program("other") == "other"


def test_the_images_is_found_without_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = environment(tmp_path / "image")
    monkeypatch.setattr(interpreters, "IMAGES", python)
    found = find_tensorrt_llm()
    assert found is not None
    assert found.python == python


def test_a_named_one_without_it_is_refused(tmp_path: Path) -> None:
    for python in (environment(tmp_path / "other", None), tmp_path / "nowhere"):
        with pytest.raises(DeploymentError, match="no Python that has TensorRT-LLM"):
            find_tensorrt_llm(python)


def test_odd_programs_and_places_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called python3 and is none, a directory that cannot be looked into, and then the one with a space."""
    number = tmp_path / "number/python3"
    number.parent.mkdir()
    number.write_text("#!/bin/sh\necho 5\n")
    number.chmod(0o755)
    with pytest.raises(DeploymentError, match="no Python that has TensorRT-LLM"):
        find_tensorrt_llm(number)
    python = environment(tmp_path / "a space")
    unreadable = "x" * 5000  # no user can look into it; root can into any that exists
    monkeypatch.setenv("PATH", f"{number.parent}:{unreadable}:{python.parent}:{os.environ['PATH']}")
    found = find_tensorrt_llm()
    assert found is not None
    assert found.python == python


@pytest.mark.proof
def test_an_engine_is_compiled_by_the_other_interpreter(
    request_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--engine auto, --flow tensorrt and a quantization meet; each stage runs where its packages are."""
    path = os.environ["PATH"]
    install_tools(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", path)  # the tools are beside their interpreter alone
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"quality": LENIENT}))
    request = request_of(
        gpu="h100",
        flow="tensorrt",
        settings=tmp_path / "settings.yaml",
        examples=tmp_path / "examples",
        plan=PlanRequest(input_tokens=64, output_tokens=32),
        output=tmp_path / "out",
        tensorrt_llm_python=environment(tmp_path / "image"),
    )
    built, lines = run(request)
    image = str(tmp_path / "image/bin/python3")
    assert any(line == f"plan: {sys.executable} quantizes and verifies; {image} compiles" for line in lines)
    deployment, manifest = load_deployment(built.directory), read_manifest(built.directory)
    assert (deployment.engine.kind, manifest.flow) == ("tensorrtllm", "tensorrt")
    assert (manifest.versions.tensorrt_llm, manifest.versions.tensorrt) == ("1.2.1", "10.14.1")
    compiled = max(request.work.glob("compile-*"), key=lambda one: one.stat().st_mtime)
    [first, second] = [log.read_text().splitlines()[0] for log in sorted((compiled / "logs").glob("*.log"))]
    assert first.partition("HF_DATASETS_OFFLINE=1 ")[2].startswith(f"{image} ")
    assert second.startswith(f"{tmp_path}/image/bin/trtllm-build ")
    assert "/readable " in first, "the tools read what transformers 4 understands"
    readable = json.loads((compiled / "readable/config.json").read_text())
    assert readable["rope_theta"] == readable["rope_parameters"]["rope_theta"]
