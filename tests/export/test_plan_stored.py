"""Plans of checkpoints that are quantized already: their sizes are the engine's, their speeds its kernels'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.engine.checkpoint import load_config, outline_model
from inflight.errors import DeploymentError
from inflight.export.checkpoint import inspect
from inflight.export.model_shape import is_quantized, read_shape, stored_weights
from inflight.export.plan.commands import _answer
from inflight.export.plan.gpus import find_gpu
from inflight.export.plan.plan import Plan, PlanRequest
from inflight.export.plan.planner import DoesNotFit, make_plan
from inflight.resources import ROOT
from tests.engine.support.gguf_files import wide_gguf_file
from tests.engine.support.packed_models import FORMATS, published
from tests.engine.test_format_checkpoints import BY_PYTORCH
from tests.export.support.planning import SHAPES, cpu

CPU = cpu()
PUBLISHED = ROOT / "tests/facts/published_configs"


def _plan(directory: Path, gpu: str = "cpu", **request: Any) -> Plan:
    shape = read_shape(directory)
    chip, small = CPU if gpu == "cpu" else find_gpu(gpu), {"input_tokens": 100, "output_tokens": 20}
    return make_plan(shape, chip, PlanRequest(**(small | request)), stored=stored_weights(directory, shape))


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_the_engines_and_so_is_what_computes(name: str, tmp_path: Path) -> None:
    directory = published(name).directory
    plan, config = _plan(directory), load_config(directory)
    held = outline_model(directory, config, torch.float32, torch.device("cpu"), 512, "auto")
    assert plan.weight_bytes == held.nbytes
    assert plan.precision == held.scheme
    assert (plan.unpredicted is not None) == (name in BY_PYTORCH)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    if name != "gptq_v2, ordered":  # whose configuration cannot say that each file has an index of groups
        assert _plan(tmp_path).precision == plan.precision, "its configuration says the same"


def _published(family: str, tmp_path: Path, **fields: Any) -> Path:
    config = json.loads((PUBLISHED / f"{family}.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    return tmp_path


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("family", "quantization", "gigabytes"),
    [
        ("GptOssForCausalLM", None, (12, 14)),
        ("Qwen3MoeForCausalLM", {"quant_method": "fp8", "weight_block_size": [128, 128]}, (30, 33)),
        ("Qwen3MoeForCausalLM", {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, (16, 18)),
        ("Qwen3MoeForCausalLM", {"quant_method": "awq", "bits": 4, "group_size": 128}, (16, 18)),
    ],
)
def test_published_models(
    family: str, quantization: dict[str, Any] | None, gigabytes: tuple[int, int], tmp_path: Path
) -> None:
    """gpt-oss-20b in MXFP4 has 13.8 GB of files; Qwen3-30B-A3B in FP8 31 GB, in GPTQ and AWQ about 17 GB."""
    fields = {} if quantization is None else {"quantization_config": quantization}
    plan = _plan(_published(family, tmp_path, **fields), "h200")
    low, high = gigabytes
    assert low < plan.weight_bytes / 1e9 < high
    assert "the portable engine decodes weights" in str(plan.unpredicted), "a GPU's speed is refused by name"


@pytest.mark.proof
def test_what_is_read_less_is_decoded_faster(tmp_path: Path) -> None:
    plain = _plan(_published("Qwen3MoeForCausalLM", tmp_path), precision="bf16")
    few = _plan(_published("Qwen3MoeForCausalLM", tmp_path, quantization_config={"quant_method": "awq"}))
    assert 2 < plain.unloaded.itl_ms / few.unloaded.itl_ms < 4.2


def test_models_of_modelopt_are_those_that_a_build_would_make(tmp_path: Path) -> None:
    shape = json.loads((ROOT / "tests/export/shapes/llama-3.1-8b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape))
    planned = make_plan(read_shape(tmp_path), find_gpu("h100"), PlanRequest(precision="fp8"))
    described = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    stored = _plan(tmp_path, "h100", input_tokens=1024, output_tokens=256)
    assert stored.weight_bytes == planned.weight_bytes
    assert stored.kv_cache == planned.kv_cache == "fp8"
    assert stored.unloaded == planned.unloaded
    with pytest.raises(DeploymentError, match="begins with 8.9; use the checkpoint that is not quantized"):
        _plan(tmp_path, "a100-80")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"quant_method": "compressed-tensors", "ignore": ["re:("]},
            "quantization_config.ignore is 're:('; it must be a regular expression",
        ),
        (
            {"quant_method": "compressed-tensors", "ignore": 5},
            "quantization_config.ignore is 5; it must be a list of names",
        ),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'; it must be a list of names"),
        (None, "quantization_config.quant_method is None; it must be one of"),
    ],
)
def test_a_configuration_without_files_may_be_wrong(fields: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    described = {"quant_method": "awq"} | fields if fields is not None else "awq"
    with pytest.raises(DeploymentError) as error:
        _plan(_published("Qwen3MoeForCausalLM", tmp_path, quantization_config=described))
    assert said in str(error.value)


@pytest.mark.proof
def test_what_is_left_out_by_name_is_not_quantized(tmp_path: Path) -> None:
    whole, part = (
        _plan(_published("Qwen3MoeForCausalLM", tmp_path, quantization_config={"quant_method": "awq"} | more))
        for more in ({}, {"modules_to_not_convert": ["self_attn"]})
    )
    assert whole.parameters == part.parameters
    assert part.weight_bytes > whole.weight_bytes + part.parameters.attention


@pytest.mark.proof
def test_what_is_no_target_is_not_quantized(tmp_path: Path) -> None:
    """By the configuration alone, as by the names of tensors, a linear that no target matches is not quantized."""
    whole, part = (
        _plan(_published("Qwen3MoeForCausalLM", tmp_path, quantization_config=_compressed(targets)))
        for targets in (["Linear"], ["re:.*mlp\\.experts.*", "re:.*v_proj$"])
    )
    assert whole.precision == part.precision == "W4A16_AWQ"
    assert 1.2 * part.parameters.attention < part.weight_bytes - whole.weight_bytes < 1.5 * part.parameters.attention


def test_an_index_may_be_as_large_as_the_engine_takes_it(tmp_path: Path) -> None:
    """That of DeepSeek-V3 in FP8 has 8.8 MB."""
    described = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    directory = _published("Qwen3MoeForCausalLM", tmp_path, quantization_config=described)
    expert = "model.layers.0.mlp.experts.0.up_proj"
    places = {f"{expert}.{kind}": "model-1.safetensors" for kind in ("weight", "weight_scale_inv")}
    index = json.dumps({"metadata": {"padding": "x" * (9 << 20)}, "weight_map": places})
    (directory / "model.safetensors.index.json").write_text(index)
    stored = stored_weights(directory, read_shape(directory))
    assert stored is not None
    assert list(stored.sizes) == [expert]
    (directory / "model-1.safetensors").touch()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    assert len(inspect(directory).weights) == 1


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {"quant_method": "awq", "bits": 4, "group_size": 128},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
    ids=["gptq", "awq", "fp8"],
)
def test_what_the_portable_engine_alone_computes_gets_one_gpu(described: dict[str, Any], tmp_path: Path) -> None:
    shape = json.loads((SHAPES / "llama-3.1-70b/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"quantization_config": described}))
    with pytest.raises(DoesNotFit, match="do not fit into 1 GPU of .*; use a smaller precision$"):
        _plan(tmp_path, "l4")


def test_groups_of_a_scale_are_not_split(tmp_path: Path) -> None:
    """Of a checkpoint as of a plan to make it: down_proj's 11,008 inputs are 86 groups of 128."""
    shape = json.loads((SHAPES / "llama-2-7b/config.json").read_text())
    described = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"quantization_config": described}))
    assert _plan(tmp_path, "h100", tensor_parallel_size=2).tensor_parallel_size == 2
    with pytest.raises(DeploymentError, match="tensor_parallel_size is 4; .* can be shared by 1, 2$"):
        _plan(tmp_path, "h100", tensor_parallel_size=4)


def test_a_measurement_of_what_is_not_quantized_calibrates_nothing_quantized(tmp_path: Path) -> None:
    measurement = ROOT / "docs/results/plan/calibration.json"
    with pytest.raises(DeploymentError, match="the measurement is in float32, and the plan in W4A16_GROUPS"):
        _answer(published("awq").directory, ["cpu"], PlanRequest(input_tokens=100, output_tokens=20), measurement, None)


def _compressed(targets: list[str], **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": targets, "weights": weights}}
    own = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return own | {"ignore": ["lm_head", "re:.*mlp\\.gate$"]} | more


def test_no_configuration_is_none(tmp_path: Path) -> None:
    directory = _published("Qwen3MoeForCausalLM", tmp_path, quantization_config=None)
    assert not is_quantized(directory)
    assert stored_weights(directory, read_shape(directory)) is None


def test_gguf_files_in_blocks_are_refused_by_name() -> None:
    assert _plan(wide_gguf_file("BF16").path).precision == "float32"
    with pytest.raises(DeploymentError, match=r"m.*\.gguf: its weights are in Q4_K, Q6_K; GGUF files in blocks are"):
        _plan(wide_gguf_file("Q4_K", (("v_proj", "Q6_K"),)).path)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"precision": "int8"}, "precision int8: the checkpoint is quantized already (W4A16_GROUPS); use auto"),
        ({"excluded": ("*",)}, "exclude: the checkpoint is quantized already (W4A16_GROUPS)"),
    ],
)
def test_it_is_quantized_already(request_: dict[str, Any], said: str) -> None:
    with pytest.raises(DeploymentError) as error:
        _plan(published("awq").directory, **request_)
    assert said in str(error.value)
