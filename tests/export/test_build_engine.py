"""Builds that compile a TensorRT engine, with stand-ins of upstream's tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from inflight.errors import DeploymentError
from inflight.export.build.request import BuildRequest
from inflight.export.plan.plan import PlanRequest
from inflight.machine import Machine, Versions
from inflight.manifest import read_manifest
from inflight.settings.deployment import load_deployment
from tests.export.support.building import LENIENT, run
from tests.export.support.compiling import install_tools
from tests.fakes.upstream_tool import FAULT

HOPPER = Machine(Versions(tensorrt="10.14.1", tensorrt_llm="1.2.1"), ("NVIDIA H100 80GB HBM3",), ((9, 0),))


@pytest.fixture
def compile_of(
    request_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., BuildRequest]:
    """Make requests for an engine for an H100, with the tools in place."""
    install_tools(tmp_path, monkeypatch)
    monkeypatch.setattr(Machine, "detect", lambda: HOPPER)
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"quality": LENIENT}))

    def make(**changes: object) -> BuildRequest:
        # A batch that the stand-in's small tables take.
        plan = PlanRequest(input_tokens=64, output_tokens=32)
        fields = {"gpu": "h100", "engine": "tensorrtllm", "settings": settings, "examples": tmp_path / "examples"}
        return request_of(**fields | {"plan": plan, "output": tmp_path / "out"} | changes)

    return make


@pytest.mark.proof
def test_an_engine_is_compiled_into_the_deployment(compile_of: Callable[..., BuildRequest]) -> None:
    built, _ = run(compile_of())
    assert "compile" in built.ran
    deployment, manifest = load_deployment(built.directory), read_manifest(built.directory)
    assert (deployment.engine.kind, manifest.flow) == ("tensorrtllm", "tensorrt")
    assert deployment.tensorrt_llm.engine_dir == built.directory / "engine"
    assert manifest.compute_capability == (9, 0)
    config = json.loads((built.directory / "engine/config.json").read_text())
    assert config["build_config"]["max_batch_size"] == deployment.batching.max_batch_size
    assert {"engine/config.json", "engine/rank0.engine", "model/tokenizer.json"} <= set(manifest.files)
    again, _ = run(compile_of())
    assert again.ran == ()


def test_a_tool_that_fails_leaves_no_deployment(
    compile_of: Callable[..., BuildRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv(FAULT, "disk-full")
        with pytest.raises(DeploymentError, match="could not .*its log is") as failure:
            run(compile_of(precision="bf16"))
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "out").exists()
    built, _ = run(compile_of(precision="bf16"))
    assert built.directory.is_dir()


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (Machine(Versions()), "here is no GPU"),
        (Machine(Versions(), ("NVIDIA L4",), ((8, 9),)), r"h100 \(9.0\); here is 8.9. --flow pytorch needs no engine"),
    ],
)
def test_an_engine_is_compiled_only_on_the_gpu_that_it_is_for(
    compile_of: Callable[..., BuildRequest], monkeypatch: pytest.MonkeyPatch, here: Machine, message: str
) -> None:
    request = compile_of()
    monkeypatch.setattr(Machine, "detect", lambda: here)
    with pytest.raises(DeploymentError, match=message):
        run(request)


def test_single_layers_cannot_be_kept_in_an_engine(compile_of: Callable[..., BuildRequest]) -> None:
    for changes in ({"keep": ("*.layers.0.*",)}, {"kl_budget": 0.1}):
        with pytest.raises(DeploymentError, match="upstream's quantize.py has neither"):
            run(compile_of(**changes))


def test_missing_tools_are_told_before_any_work(compile_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="is not here, to .*26.07-trtllm-python-py3 has it"):
        run(compile_of(examples=tmp_path / "nowhere", work=tmp_path / "work"))
    assert not list((tmp_path / "work").glob("quantize-*"))
