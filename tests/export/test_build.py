"""Builds, from end to end: what is made, what is found again, what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from inflight.engine.checkpoint import load_config
from inflight.engine.quant.linears import QuantizedLinear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from inflight.export.build.blueprint import Blueprint, make_blueprint
from inflight.export.build.pipeline import known_cpu, weight_bytes
from inflight.export.build.request import BuildRequest
from inflight.export.checkpoint import inspect
from inflight.export.plan.gpus import find_gpu
from inflight.export.plan.plan import PlanRequest
from inflight.manifest import read_manifest
from inflight.settings.batching import ON_CPU
from inflight.settings.deployment import load_deployment
from tests.engine.support.published import config_of
from tests.export.support.building import LENIENT, Built, run
from tests.export.support.tiny import scale_tensor

pytestmark = pytest.mark.proof


@pytest.fixture(autouse=True)
def _pictures_are_drawn_once(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """``built`` has drawn a report's pictures: half of the time of a build as small as these."""
    monkeypatch.setattr("inflight.report.page._picture", lambda *_: "<svg></svg>")


def test_a_build_is_a_deployment_with_its_manifest_and_report(built: Built, ground: Path) -> None:
    assert {"machine", "plan", "quantize", "verify"} == set(built.ran)
    deployment = load_deployment(built.directory)
    assert deployment.engine.kind == "pytorch"
    assert deployment.limits.max_sequence_length == load_config(ground / "tiny").max_position_embeddings
    size = deployment.batching.size(on_gpu=False)
    assert size.sequences >= ON_CPU.sequences
    assert size.tokens >= ON_CPU.tokens
    assert deployment.batching.prefill_chunk_tokens is not None, "the plan knows how fast a prompt is"
    manifest = read_manifest(built.directory)
    assert manifest.flow == "portable"
    assert manifest.precision == "fp8"
    assert set(manifest.quality) >= {"max_perplexity_increase", "max_kl_divergence"}
    on_disk = {path.relative_to(built.directory).as_posix() for path in built.directory.rglob("*") if path.is_file()}
    assert on_disk == {*manifest.files, "manifest.json"}
    assert {"quality.html", "quality.json", "plan.json", "model/tokenizer.json"} <= on_disk
    assert (built.directory / "quality.html").read_text().count("<path") > 10, "no pictures were drawn"
    assert weight_bytes(built.directory / "model") < 0.9 * weight_bytes(ground / "tiny")
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


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize(
    ("tensor", "factor", "named"),
    [
        (
            "mlp.down_proj.weight_scale",
            4.0,
            "max_weight_error is [23].* in model.layers.1.mlp.down_proj",
        ),
        ("mlp.gate_proj.weight_scale", 0.25, "max_weight_error is 7[0-9].* in model.layers.1.mlp.gate_proj"),
        ("self_attn.q_proj.weight_scale", 4.0, "max_weight_error is [23].* in model.layers.1.self_attn.q_proj"),
        ("self_attn.o_proj.weight_scale", 0.25, "max_weight_error .* in model.layers.1.self_attn.o_proj"),
        ("mlp.gate_proj.input_scale", 0.25, "min_range is 2.* in model.layers.1.mlp.gate_proj"),
        ("self_attn.v_proj.v_scale", 0.25, "min_range is 2.* in model.layers.1, KV cache"),
    ],
)
def test_a_scale_that_is_off_by_four_fails_and_the_layer_is_named(
    built: Built,
    request_of: Callable[..., BuildRequest],
    ground: Path,
    tmp_path: Path,
    tensor: str,
    factor: float,
    named: str,
) -> None:
    work, settings = tmp_path / "work", tmp_path / "settings.yaml"
    shutil.copytree(ground / "work", work)
    settings.write_text(yaml.safe_dump({"engine": {"dtype": "float32"}}))
    request = request_of(settings=settings, work=work, output=tmp_path / "whole")
    run(request)  # what is whole holds the thresholds that a build has by default
    for left in work.glob("verify-*"):
        shutil.rmtree(left)
    scale_tensor(next(work.glob("quantize-*")) / "model", f"model.layers.1.{tensor}", factor)
    with pytest.raises(DeploymentError, match=named) as failure:
        run(replace(request, output=tmp_path / "damaged"))
    assert not (tmp_path / "damaged").exists()
    page = Path(str(failure.value).rpartition("The report: ")[2])
    assert "model.layers.1" in page.read_text()


def test_a_quantized_checkpoint_is_not_quantized_again(built: Built, request_of: Callable[..., BuildRequest]) -> None:
    with pytest.raises(DeploymentError, match="is quantized already"):
        run(request_of(model=built.directory / "model"))


def test_a_gguf_file_is_not_quantized(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"m\.gguf is a GGUF file; build from the original checkpoint"):
        inspect(tmp_path / "m.gguf")


def test_sensitive_layers_stay_in_16_bit(request_of: Callable[..., BuildRequest], tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="every layer loses more; nothing is left to quantize"):
        run(request_of(precision="int4-awq", kl_budget=0.0, output=tmp_path / "none"))
    found = json.loads(next(request_of().work.glob("sensitivity-*/sensitivity.json")).read_text())
    whole, most = sum(one["kl_divergence"] for one in found), found[0]["kl_divergence"]
    made, _ = run(request_of(precision="int4-awq", kl_budget=whole - most / 2, output=tmp_path / "mixed"))
    quantization = json.loads((made.directory / "model/hf_quant_config.json").read_text())["quantization"]
    assert set(found[0]["linears"]) <= set(quantization["exclude_modules"])
    linears = Scorer(made.directory / "model").linears
    assert [type(linears[name]) for name in found[0]["linears"]] == [nn.Linear] * len(found[0]["linears"])
    assert isinstance(linears[found[-1]["linears"][0]], QuantizedLinear)


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


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"engine": {"kind": "trtllm"}}, "engine.kind is 'trtllm'; the build is for 'pytorch': say it with --engine"),
        ({"kv_cache": {"dtype": "fp8"}}, "kv_cache.dtype is 'fp8'; the build is for 'auto': say it with --kv-cache"),
        ({"limits": {"max_sequence_length": 9999}}, "is 9999; the model's own limit is 512"),
        ({"limits": "none"}, "limits"),
        ({"speculation": {"method": "eagle", "draft_model": "nowhere"}}, "nowhere is not a directory beside it"),
        ({"batchin": {}}, "did you mean 'batching'"),
    ],
)
def test_settings_that_contradict_the_build_are_refused(
    request_of: Callable[..., BuildRequest], tmp_path: Path, own: dict[str, Any], message: str
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(own))
    with pytest.raises(DeploymentError, match=message):
        run(request_of(precision="bf16", settings=settings, output=tmp_path / "out"))


@pytest.mark.parametrize("engine", ["trtllm", "tensorrtllm"])
def test_drafts_whose_positions_tensorrt_llm_would_misread_are_refused_before_anything_runs(
    request_of: Callable[..., BuildRequest], tmp_path: Path, engine: str
) -> None:
    (tmp_path / "heads").mkdir()
    rope = {"rope_theta": 500_000.0, "rope_type": "default"}
    (tmp_path / "heads/config.json").write_text(json.dumps({"rope_parameters": rope}))
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"speculation": {"method": "eagle", "draft_model": "heads"}}))
    request = request_of(gpu="h100", engine=engine, precision="bf16", settings=settings, output=tmp_path / "out")
    with pytest.raises(DeploymentError, match="heads/config.json has rope_theta 500000 in rope_parameters alone"):
        make_blueprint(request, inspect(request.model), find_gpu(request.gpu), dry_run=True)


@pytest.mark.sweep(most=2)
@pytest.mark.parametrize(
    ("family", "what"),
    [
        ("Qwen3MoeForCausalLM", "experts"),
        ("DeepseekV3ForCausalLM", "experts, latent attention"),
        (
            "Gemma4ForConditionalGeneration-31B",
            "layers of Gemma 4, parts for images or sound",
        ),
    ],
)
def test_what_quantization_was_not_shown_for_is_refused_by_name(
    request_of: Callable[..., BuildRequest], tmp_path: Path, family: str, what: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = config_of(family)
    config.pop("quantization_config", None)
    (model / "config.json").write_text(json.dumps(config))
    request = replace(request_of(gpu="h200", precision="fp8", output=tmp_path / "out"), model=model)
    with pytest.raises(DeploymentError, match=f"does not quantize models with {what}[,;]"):
        make_blueprint(request, inspect(model), find_gpu("h200"), dry_run=True)


def test_groups_that_do_not_divide_a_row_are_refused_before_anything_runs(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    config = json.loads((request_of().model / "config.json").read_text())
    request, gpu = request_of(model=tmp_path, gpu="h100", precision="int4-awq"), find_gpu("h100")

    def blueprint(inputs: int, **changes: Any) -> Blueprint:
        (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": inputs}))
        return make_blueprint(replace(request, **changes), inspect(tmp_path), gpu, dry_run=True)

    assert blueprint(192).recipe.group == 64
    assert blueprint(208, keep=("*down_proj",)).recipe.group == 128
    assert blueprint(160, engine="pytorch").recipe.group == 32
    with pytest.raises(
        DeploymentError, match=r"int4-awq: model\.layers\.0\.mlp\.down_proj has 208 inputs, and groups of 32"
    ):
        blueprint(208)
    with pytest.raises(
        DeploymentError, match="groups of 32 inputs, and TensorRT-LLM has 64 and more; use --engine pytorch"
    ):
        blueprint(160)


def test_a_chunk_of_the_plan_is_no_larger_than_a_step_of_the_settings(
    built: Built, request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"batching": {"max_tokens_per_step": 40}}))
    made = make_blueprint(request_of(settings=settings), inspect(request_of().model), find_gpu("cpu"), dry_run=True)
    assert made.deployment.batching.prefill_chunk_tokens is not None
    assert made.deployment.batching.prefill_chunk_tokens <= 40


def test_the_remedy_is_one_that_the_flow_has(request_of: Callable[..., BuildRequest]) -> None:
    source, h100 = inspect(request_of().model), find_gpu("h100")

    def remedy(precision: str, **changes: Any) -> str:
        request = request_of(precision=precision, gpu="h100", settings=None, **changes)
        return make_blueprint(request, source, h100, dry_run=True).remedy

    assert remedy("int8") == "better: `--precision bf16`"
    assert remedy("int8", engine="pytorch").startswith("better: `--kl-budget` and `--keep`")
    assert remedy("fp8").startswith("better: `--precision int8`, in as many bytes")
    assert "--kl-budget" in remedy("fp8")
    assert "--kl-budget" not in remedy("fp8", flow="tensorrt")


def test_what_each_layer_costs_is_shown_and_on_the_deployments_page(
    built: Built, request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    made, lines = run(request_of(layer_costs=True, output=tmp_path / "out"))
    assert made.ran == ("costs",)
    assert [line for line in lines if line.startswith("costs: most is lost in model.layers.")]
    assert "KL saved by restoring it" in (made.directory / "quality.html").read_text()
    again, _ = run(request_of(output=tmp_path / "again"))
    assert again.ran == ()
    assert "KL saved by restoring it" in (again.directory / "quality.html").read_text(), "what is known stays there"


def test_int8_has_groups_where_the_portable_engine_serves_it_and_rows_in_an_engine(
    request_of: Callable[..., BuildRequest],
) -> None:
    source, h100 = inspect(request_of().model), find_gpu("h100")

    def blueprint(**changes: Any) -> Blueprint:
        request = request_of(precision="int8", gpu="h100", settings=None, **changes)
        return make_blueprint(request, source, h100, dry_run=True)

    assert blueprint(engine="pytorch").recipe.group == 64
    assert blueprint().recipe.group == 0
    fp8 = PlanRequest(kv_cache="fp8", input_tokens=64, output_tokens=32)
    assert blueprint(plan=fp8).recipe.fp8_kv_cache
    with pytest.raises(DeploymentError, match="--kv-cache fp8: int8 is not calibrated.*use --kv-cache bf16"):
        blueprint(plan=fp8, engine="pytorch")


def test_the_machine_is_measured_as_the_settings_have_it_compute(
    built: Built, request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    whole, half = (
        make_blueprint(request_of(settings=path), inspect(request_of().model), find_gpu("cpu"), dry_run=True).plan
        for path in (request_of().settings, None)
    )
    assert whole.weight_bytes > half.weight_bytes, "what is not quantized is in engine.dtype, float32 in these settings"
    known = known_cpu(request_of())
    assert known is not None
    assert known.native is not None
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"engine": {"cpu_step": "pytorch", "dtype": "float32"}, "quality": LENIENT}))
    request = request_of(settings=settings, precision="float32", output=tmp_path / "out")
    assert known_cpu(request) is None
    made, _ = run(request)
    assert "machine" in made.ran
    measured = known_cpu(request)
    assert measured is not None
    assert measured.native is None
    settings.write_text("engine: {cpu_step: sse9}")
    with pytest.raises(DeploymentError, match="engine.cpu_step"):
        known_cpu(request)


@pytest.mark.sweep
@pytest.mark.parametrize(("precision", "dtype"), [("auto", "float32"), ("bf16", "bfloat16"), ("int8", "auto")])
def test_what_is_planned_is_what_is_computed_in(
    request_of: Callable[..., BuildRequest], tmp_path: Path, precision: str, dtype: str
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump({"quality": LENIENT}))
    made, _ = run(request_of(precision=precision, settings=settings, output=tmp_path / "out"))
    assert load_deployment(made.directory).engine.dtype == dtype
    assert read_manifest(made.directory).precision == ("float32" if precision == "auto" else precision)


def test_the_original_is_not_shared_but_for_its_weights(
    request_of: Callable[..., BuildRequest], ground: Path, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("{}")
    made, _ = run(request_of(precision="bf16", settings=settings, output=tmp_path / "out"))
    for file in (made.directory / "model").iterdir():
        shared = file.samefile(ground / "tiny" / file.name)
        assert not shared or file.suffix == ".safetensors"


def test_a_broken_memory_of_fingerprints_costs_time_and_no_more(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/fingerprints.json").write_text('{"half')
    settings = tmp_path / "settings.yaml"
    settings.write_text("{}")
    run(request_of(precision="bf16", settings=settings, work=tmp_path / "work", output=tmp_path / "out"))
    assert json.loads((tmp_path / "work/fingerprints.json").read_text())


def test_linears_that_are_computed_as_one_are_kept_together(
    request_of: Callable[..., BuildRequest], tmp_path: Path
) -> None:
    made, _ = run(request_of(keep=("*.layers.0.*.q_proj",), output=tmp_path / "out"))
    quantization = json.loads((made.directory / "model/hf_quant_config.json").read_text())["quantization"]
    kept = {f"model.layers.0.self_attn.{name}_proj" for name in "qkv"}
    assert kept <= set(quantization["exclude_modules"])
