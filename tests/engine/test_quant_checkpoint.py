"""Quantized checkpoints that cannot be served are refused in one line that names the fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.quant.linears import SCHEMES
from inflight.engine.quant.readers.methods import load_quantization
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import TOKENS, checkpoint
from tests.engine.support.driving import load
from tests.engine.support.quantized import copied, mixed, quantized, random_model

LINEAR = "model.layers.1.mlp.down_proj"


def _refused(directory: Path, *words: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def _with(directory: Path, change: Callable[[dict[str, Any]], Any], file: str = "hf_quant_config.json") -> Path:
    """Return a copy with ``change`` made to what ``quantization`` says, or to the whole of another file."""
    directory = copied(directory)
    data = json.loads((directory / file).read_text())
    change(data["quantization"] if file == "hf_quant_config.json" else data)
    (directory / file).write_text(json.dumps(data))
    return directory


def _with_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    directory = copied(directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("algorithm", ["NVFP4_SVD", "MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "NFVP4", "fp8"])
def test_an_unknown_scheme_is_refused_with_the_list(algorithm: str) -> None:
    directory = _with(quantized("NVFP4").directory, lambda data: data.update(quant_algo=algorithm))
    _refused(directory, f"quant_algo '{algorithm}' is not supported", *SCHEMES, "MIXED_PRECISION")
    if algorithm == "NFVP4":
        _refused(directory, "did you mean 'NVFP4'?")


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "mxfp8", "hqq", "quark", "auto-round", 3, None])
def test_other_quantization_methods_are_refused(method: str | None) -> None:
    directory = _with(
        quantized("none").directory,
        lambda data: data.update(quantization_config={"quant_method": method}),
        "config.json",
    )
    _refused(
        directory, f"quant_method is {method!r}; it must be one of modelopt, fp8, compressed-tensors, gptq, awq, mxfp4"
    )


def test_a_quantization_config_that_is_no_object_is_refused() -> None:
    change = {"quantization_config": "modelopt"}
    _refused(
        _with(quantized("none").directory, lambda data: data.update(change), "config.json"), "quant_method is None"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(kv_cache_quant_algo="NVFP4"), ("kv_cache_quant_algo 'NVFP4'", "FP8")),
        (lambda data: data.update(kv_cache_quant_algo="INT8"), ("kv_cache_quant_algo 'INT8'",)),
        (lambda data: data.update(has_zero_point=True), ("has_zero_point",)),
        (lambda data: data.update(group_size=48), ("q_proj has 128 columns", "multiple of 48")),
        (lambda data: data.update(group_size=64), ("weight_scale is [", "expected [")),
        (lambda data: data.update(group_size="many"), ("group_size is 'many'",)),
        (lambda data: data.update(quant_algo="NVFP4"), ("group_size 128; NVFP4 has 16",)),
        (lambda data: data.update(quant_algo="FP8"), ("weight is [",)),
        (lambda data: data.update(quant_algo="MIXED_PRECISION"), ("quantized_layers names no layer",)),
        (lambda data: data.update(quant_algo=None), ("no place",)),
        (lambda data: data["exclude_modules"].append(LINEAR), (LINEAR,)),
        (lambda data: data.update(exclude_modules="lm_head"), ("exclude_modules is 'lm_head'",)),
        (
            lambda data: data.update(quant_algo="MIXED_PRECISION", quantized_layers={LINEAR: "FP8"}),
            (f"{LINEAR}: 'FP8' is not an object",),
        ),
        (lambda data: data.update(exclude_modules=[]), ("lm_head",)),
    ],
)
def test_what_the_configuration_says(change: Callable[[dict[str, Any]], Any], words: tuple[str, ...]) -> None:
    _refused(_with(quantized("AWQ").directory, change), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(f"{LINEAR}.weight_scale"), ("no tensor for", f"{LINEAR}.weight_scale")),
        (lambda tensors: tensors.pop(f"{LINEAR}.input_scale"), ("no tensor for", f"{LINEAR}.input_scale")),
        (
            lambda tensors: tensors.pop("model.layers.0.self_attn.v_proj.weight"),
            ("no tensor for model.layers.0.self_attn.v_proj.weight (1 in all)",),
        ),
        (lambda tensors: tensors.update({f"{LINEAR}.zeros": torch.ones(1)}), (f"{LINEAR}.zeros has no place",)),
        (
            lambda tensors: tensors.update({f"{LINEAR}.weight": torch.ones(128, 256)}),
            (f"{LINEAR}.weight is torch.float32", "torch.float8_e4m3fn"),
        ),
        (
            lambda tensors: tensors.update({f"{LINEAR}.weight_scale": torch.ones(128)}),
            (f"{LINEAR}.weight_scale is [128]; expected []",),
        ),
        (
            lambda tensors: tensors.update({f"{LINEAR}.input_scale": torch.zeros(())}),
            (f"{LINEAR}.input_scale is 0.0; a scale must be a positive number",),
        ),
        (
            lambda tensors: tensors.update({f"{LINEAR}.input_scale": torch.tensor(float("nan"))}),
            (f"{LINEAR}.input_scale is nan",),
        ),
        (
            lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.k_scale"),
            ("no tensor for model.layers.2.self_attn.k_proj.k_scale",),
        ),
        (
            lambda tensors: tensors.update({"model.layers.9.self_attn.v_proj.v_scale": torch.ones(())}),
            ("model.layers.9.self_attn.v_proj.v_scale has no place",),
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}),
            ("lm_head.weight is torch.float8_e4m3fn",),
        ),
    ],
)
def test_tensors_that_are_missing_or_wrong(change: Any, words: tuple[str, ...]) -> None:
    _refused(_with_tensors(quantized("FP8", fp8_kv_cache=True).directory, change), *words)


@pytest.mark.parametrize(
    ("scheme", "kind", "value"),
    [
        ("W8A16", "weight_scale", math.nan),
        ("W8A16", "weight_scale", -0.5),
        ("SmoothQuant", "pre_quant_scale", math.inf),
        ("AWQ", "weight_scale", math.inf),
        ("AWQ", "weight_scale", -math.inf),
        ("NVFP4", "weight_scale", math.nan),
        ("NVFP4", "weight_scale", -0.5),
    ],
)
def test_a_wrong_scale_among_many(scheme: str, kind: str, value: float) -> None:
    """Of rows, channels, groups and blocks."""
    tensor = f"{LINEAR}.{kind}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        scales = tensors[tensor].float()
        scales.view(-1)[5] = value
        tensors[tensor] = scales.to(tensors[tensor].dtype)

    _refused(_with_tensors(quantized(scheme).directory, damage), f"{tensor} has {value}; its scales must be finite")


def test_a_row_of_zeros_may_have_a_scale_of_zero() -> None:
    def empty(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LINEAR}.weight_scale"][3] = 0

    scorer = Scorer(_with_tensors(quantized("W8A16").directory, empty), "float32", device="cpu")
    assert not scorer.weight(LINEAR)[3].any()


def test_scales_of_a_cache_that_is_not_declared_are_not_ignored() -> None:
    directory = _with(quantized("FP8", fp8_kv_cache=True).directory, lambda data: data.update(kv_cache_quant_algo=None))
    _refused(directory, "k_proj.k_scale has no place")


def test_what_a_model_does_not_take_of_its_checkpoint() -> None:
    """An output projection that is tied to the embedding; and a cache's scales where the cache is not in FP8."""

    def add_output(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tied = Scorer(_with_tensors(checkpoint("qwen2, tied"), add_output), device="cpu").logits(TOKENS)
    assert torch.equal(tied, Scorer(checkpoint("qwen2, tied"), device="cpu").logits(TOKENS))
    calibrated = Scorer(quantized("FP8", fp8_kv_cache=True).directory, kv_dtype="float32", device="cpu")
    assert calibrated.kv_scales is None
    assert calibrated.logits(TOKENS).isfinite().all()


def test_scales_in_a_shape_of_one_are_scalars() -> None:
    model = quantized("FP8")

    def reshape(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.reshape(1) for name, tensor in tensors.items() if not tensor.dim()})

    scorer = Scorer(_with_tensors(model.directory, reshape), "float64", device="cpu")
    torch.testing.assert_close(scorer.logits(TOKENS), model.logits(TOKENS), atol=1e-6, rtol=1e-6)


def test_a_layer_that_is_not_there() -> None:
    layer = {"model.layers.7.mlp.up_proj": {"quant_algo": "FP8"}}
    _refused(
        _with(mixed().directory, lambda data: data["quantized_layers"].update(layer)),
        "quantized_layers names model.layers.7.mlp.up_proj; the model has no such layer",
    )


def test_rows_that_do_not_pair() -> None:
    """Two rows of INT4 share a byte."""
    directory = copied(quantized("AWQ").directory)
    random_model(intermediate_size=257).save_pretrained(directory)
    _refused(directory, "257 rows; W4A16_AWQ needs a multiple of 2")


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["FP8", "AWQ", "NVFP4", "mixed"])
def test_without_the_file_of_its_own_config_json_says_it(scheme: str) -> None:
    model = mixed() if scheme == "mixed" else quantized(scheme, fp8_kv_cache=scheme == "FP8")
    directory = copied(model.directory)
    (directory / "hf_quant_config.json").unlink()
    assert load_quantization(directory, frozenset()) == load_quantization(model.directory, frozenset())
    logits = Scorer(directory, "float64", device="cpu").logits(TOKENS)
    torch.testing.assert_close(logits, model.logits(TOKENS), atol=1e-6, rtol=1e-6)


def test_wildcards_exclude() -> None:
    quantization = load_quantization(
        _with(
            quantized("FP8").directory,
            lambda data: data.update(exclude_modules=["*.k_proj", "model.layers.1.*", "lm_head"]),
        ),
        frozenset(),
    )
    assert quantization is not None
    named = {
        name: quantization.of(f"model.layers.{name}")
        for name in ("0.self_attn.q_proj", "0.self_attn.k_proj", "1.mlp.up_proj")
    }
    assert [bool(held) for held in named.values()] == [True, False, False]
    assert quantization.of("lm_head") is None


@pytest.mark.parametrize("text", ['{"quantization": 3}', "[]", "not json"])
def test_a_file_that_is_none(text: str) -> None:
    directory = copied(quantized("FP8").directory)
    (directory / "hf_quant_config.json").write_text(text)
    _refused(directory, "hf_quant_config.json")
