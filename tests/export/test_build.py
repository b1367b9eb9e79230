"""Builds, from end to end: what is made, what is found again, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from inflight.deployment import load_deployment
from inflight.engine.quant.linears import QuantizedLinear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from inflight.export.build import pipeline, steps
from inflight.export.build.pipeline import Built
from inflight.export.build.request import BuildRequest
from inflight.export.plan.plan import PlanRequest
from inflight.export.quantize.sensitivity import read_sensitivities
from inflight.manifest import read_manifest
from tests.export.building import LENIENT, run
from tests.export.tiny import scale_tensor


def test_a_build_is_a_deployment_with_its_manifest_and_report(built: Built, ground: Path) -> None:
    assert {"machine", "plan", "quantize", "verify"} == set(built.ran)
    deployment = load_deployment(built.directory)
    assert deployment.engine.kind == "pytorch"
    assert deployment.limits.max_sequence_length is not None
    manifest = read_manifest(built.directory)
    assert manifest.flow == "portable"
    assert manifest.precision == "fp8"
    assert set(manifest.quality) >= {"max_perplexity_increase", "max_kl_divergence"}
    on_disk = {path.relative_to(built.directory).as_posix() for path in built.directory.rglob("*") if path.is_file()}
    assert on_disk == {*manifest.files, "manifest.json"}
    assert {"quality.html", "quality.json", "plan.json", "model/tokenizer.json"} <= on_disk
    assert steps.weight_bytes(built.directory / "model") < 0.9 * steps.weight_bytes(ground / "tiny")
    assert "FP8" in Scorer(built.directory / "model").scheme


def test_a_second_run_does_nothing_and_says_so(built: Built, request_of: Callable[..., BuildRequest]) -> None:
    before = {path: path.stat().st_mtime_ns for path in built.directory.rglob("*")}
    again, lines = run(request_of())
    assert again.ran == ()
    assert before == {path: path.stat().st_mtime_ns for path in built.directory.rglob("*")}
    done = [line for line in lines if "nothing to do" in line]
    assert {line.split(":")[0] for line in done} >= {"plan", "quantize", "compile", "verify", "write"}


def test_other_thresholds_only_write_again(
    built: Built, request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"engine": {"dtype": "float32"}, "quality": LENIENT | {"max_kl_divergence": 7}}))
    again, _ = run(request_of(settings=settings, output=tmp_path / "out"))
    assert again.ran == ()
    assert load_deployment(again.directory).quality.max_kl_divergence == 7


@pytest.mark.parametrize(
    ("tensor", "factor", "named"),
    [
        ("model.layers.1.mlp.down_proj.weight_scale", 4.0, "differ most in down_proj, by 300"),
        ("model.layers.1.self_attn.v_proj.weight_scale", 0.25, "differ most in v_proj, by 75"),
        ("model.layers.1.mlp.gate_proj.input_scale", 0.25, ""),
        ("model.layers.1.self_attn.v_proj.v_scale", 0.25, r"its KV cache holds only 0\.2"),
    ],
)
def test_a_damaged_scale_fails_and_the_layer_is_named(
    built: Built,
    request_of: Callable[..., BuildRequest],
    ground: Path,
    tmp_path: Path,
    tensor: str,
    factor: float,
    named: str,
) -> None:
    work = tmp_path / "work"
    shutil.copytree(ground / "work", work)
    stage = next(work.glob("quantize-*"))
    for left in work.glob("verify-*"):
        shutil.rmtree(left)
    scale_tensor(stage / "model", tensor, factor)
    settings = tmp_path / "settings.yaml"
    strict = LENIENT | {"max_kl_divergence": 1e-5}
    settings.write_text(yaml.safe_dump({"engine": {"dtype": "float32"}, "quality": strict}))
    message = rf"max_kl_divergence .*most: model\.layers\.1 \([^)]*{named}"
    with pytest.raises(DeploymentError, match=message) as failure:
        run(request_of(settings=settings, work=work, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    page = Path(str(failure.value).rpartition("The report: ")[2])
    assert "model.layers.1" in page.read_text()


def test_what_a_build_did_not_make_is_not_replaced(request_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(DeploymentError, match="was not made by a build"):
        run(request_of(output=tmp_path))
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_quantized_checkpoint_is_not_quantized_again(built: Built, request_of: Callable[..., BuildRequest]) -> None:
    with pytest.raises(DeploymentError, match="is quantized already"):
        run(request_of(model=built.directory / "model"))


def test_sensitive_layers_stay_in_16_bit(request_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="every layer loses more; nothing is left to quantize"):
        run(request_of(precision="int4-awq", kl_budget=0.0, output=tmp_path / "none"))
    found = read_sensitivities(next(request_of().work.glob("sensitivity-*")))
    whole, most = sum(one.kl_divergence for one in found), found[0].kl_divergence
    made, _ = run(request_of(precision="int4-awq", kl_budget=whole - most / 2, output=tmp_path / "mixed"))
    quantization = json.loads((made.directory / "model/hf_quant_config.json").read_text())["quantization"]
    assert set(found[0].linears) <= set(quantization["exclude_modules"])
    linears = Scorer(made.directory / "model").linears
    assert [type(linears[name]) for name in found[0].linears] == [nn.Linear] * len(found[0].linears)
    assert isinstance(linears[found[-1].linears[0]], QuantizedLinear)


def test_only_the_cache_can_be_quantized(request_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    plan = PlanRequest(kv_cache="fp8", input_tokens=64, output_tokens=32)
    made, _ = run(request_of(precision="bf16", plan=plan, output=tmp_path / "out"))
    quantization = json.loads((made.directory / "model/hf_quant_config.json").read_text())["quantization"]
    assert quantization["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": "a100-80", "precision": "fp8"}, "fp8 begins with 8.9; use int8 or int4-awq"),
        ({"gpu": "h100", "precision": "nvfp4"}, "nvfp4 begins with 10.0; use fp8"),
        ({"gpu": "h1000"}, "did you mean 'h100'"),
        ({"keep": ("*.w7",)}, "matches no linear layer"),
        ({"engine": "trtllm"}, "needs a GPU"),
        ({"flow": "tensorrt"}, "the portable engine has none"),
        ({"precision": "bf16", "kl_budget": 0.1}, "quantizes no layer"),
        ({"settings": Path("nowhere.yaml")}, "nowhere.yaml: cannot be read"),
        ({"device": "cuda"}, "no CUDA device"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(
    request_of: Callable[..., BuildRequest], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DeploymentError, match=message):
        run(request_of(work=tmp_path / "work", output=tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_without_tensorrt_llm_the_deployment_is_for_the_portable_engine(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    made, lines = run(request_of(gpu="h100", output=tmp_path / "out"))
    assert load_deployment(made.directory).engine.kind == "pytorch"
    assert any("because TensorRT-LLM is not installed here" in line for line in lines)


def test_a_deployment_for_the_llm_api_can_be_written_anywhere(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"quality": LENIENT}))
    made, _ = run(request_of(gpu="h100", engine="trtllm", settings=settings, output=tmp_path / "out"))
    deployment, manifest = load_deployment(made.directory), read_manifest(made.directory)
    assert (deployment.engine.kind, manifest.flow) == ("trtllm", "pytorch")
    assert pipeline.Built(made.directory, made.ran) == made
