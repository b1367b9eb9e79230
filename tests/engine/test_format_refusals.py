"""Checkpoints of other formats that cannot be served are refused in one line that names the fault."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inflight.engine.quant.packing import require_zeros
from inflight.engine.quant.readers.compressed_names import ByName, read_names
from inflight.errors import DeploymentError
from tests.engine.support.driving import load
from tests.engine.support.packed_models import published

LINEAR = "model.layers.1.mlp.down_proj"
Change = Callable[[dict[str, Any]], Any]
GROUP = "config_groups", "group_0"


def _changed(name: str, folder: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    """Return a copy of a checkpoint with changes to its ``quantization_config``, or to its tensors."""
    copy = Path(shutil.copytree(published(name).directory, folder / secrets.token_hex(4)))
    if config is not None:
        data = json.loads((copy / "config.json").read_text())
        config(data["quantization_config"])
        (copy / "config.json").write_text(json.dumps(data))
    if tensors is not None:
        held = load_file(copy / "model.safetensors")
        tensors(held)
        save_file({one: tensor.contiguous() for one, tensor in held.items()}, copy / "model.safetensors")
    return copy


def _refused(directory: Path, *words: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def _weights(**changes: Any) -> Change:
    return lambda data: data["config_groups"]["group_0"]["weights"].update(changes)


def _inputs(**changes: Any) -> Change:
    return lambda data: data["config_groups"]["group_0"]["input_activations"].update(changes)


def _group(**changes: Any) -> Change:
    return lambda data: data["config_groups"]["group_0"].update(changes)


def _all(**changes: Any) -> Change:
    return lambda data: data.update(changes)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq", _all(bits=3), ("quantization_config.bits is 3; it must be one of 4, 8",)),
        ("gptq", _all(bits="4"), ("quantization_config.bits is '4'",)),
        ("gptq", _all(bits=None), ("quantization_config.bits is None",)),
        ("gptq", _all(group_size=0), ("group_size is 0; it must be a positive integer up to 1048576, or -1",)),
        ("gptq", _all(group_size=48), ("has 64 columns", "multiple of 48")),
        ("gptq", _all(desc_act="yes"), ("desc_act is 'yes'; it must be one of False, True",)),
        ("gptq", _all(sym=1), ("sym is 1",)),
        ("gptq", _all(checkpoint_format="marlin"), ("checkpoint_format is 'marlin'; it must be one of 'gptq'",)),
        ("gptq", _all(checkpoint_format="gptq_v2"), (".qzeros has zero points",)),
        ("gptq", _all(pack_dtype="int8"), ("pack_dtype is 'int8'; it must be one of 'int32'",)),
        ("gptq", _all(is_marlin_format=True), ("is_marlin_format is True; it is not supported",)),
        ("gptq", _all(dynamic={"+:.*": {"bits": 8}}), ("dynamic is {'+:.*'", "begin with '-:'")),
        ("gptq_v2, ordered", _all(desc_act=False), (".g_idx names groups that do not lie in a row",)),
        ("gptq_v2, ordered", _all(sym=True), (".qzeros has zero points",)),
        ("gptq", _all(group_size=2**40), ("group_size is 1099511627776; it must be a positive integer up to 1048576",)),
        ("gptq", _all(quant_method=["gptq"]), ("quant_method is ['gptq']; it must be one of",)),
        ("int4", _all(ignore=["re:(.*)*(.*)*x"]), ("ignore is 're:(.*)*(.*)*x'; it must be simpler",)),
        ("int4", _group(targets=["re:" + "(a|a)" * 40]), ("it must be simpler",)),
        ("int4", _group(targets=["re:" + ".*" * 5]), ("it must be simpler",)),
        ("int4", _all(ignore=["re:(?#[)(a+)+(?#])b"]), ("is 're:(?#[)(a+)+(?#])b'; it must be without comments",)),
        ("int4", _group(targets=["re:(?x)(a+) +b"]), ("targets is 're:(?x)(a+) +b'; it must be without comments",)),
        ("int4", _all(ignore=["re:(?x)a # )"]), ("without comments, which begin with (?#, and without the flag x",)),
        ("int4", _all(ignore=["re:b|(?i:a)|(?ix:(a+) +b)"]), ("without the flag x",)),
        ("int4", _all(ignore=[f"re:{'.*' * 4}{one}" for one in range(4000)]), ("4,000 patterns match", "simpler")),
        ("int4", _weights(strategy="block", block_structure="1x" + "9" * 5000), ("block_structure is '1x999",)),
        ("awq", _all(bits=8), ("bits is 8; it must be one of 4",)),
        ("awq", _all(version="gemv"), ("version is 'gemv'; it must be one of 'gemm'",)),
        ("awq", _all(zero_point=False), (".qzeros has zero points",)),
        ("awq", _all(zero_point="no"), ("zero_point is 'no'",)),
        ("fp8 by blocks", _all(activation_scheme="static"), ("activation_scheme is 'static'; it must be 'dynamic'",)),
        ("fp8 by blocks", _all(activation_scheme="token"), ("activation_scheme is 'token'",)),
        ("fp8 by blocks", _all(weight_block_size=[128]), ("weight_block_size is [128]; it must be two positive",)),
        ("fp8 by blocks", _all(weight_block_size=[40, 64]), ("weight_scale is [", "weight_scale_inv)")),
        ("fp8 by blocks", _all(fmt="e5m2"), ("fmt is 'e5m2'",)),
        ("fp8 by blocks", _all(scale_fmt="log"), ("scale_fmt is 'log'",)),
        ("fp8 by blocks", _all(modules_to_convert=["embed_tokens"]), ("modules_to_convert is ['embed_tokens']",)),
        ("int4", _all(format="marlin-24"), ("format is 'marlin-24'; it must be one of 'pack-quantized'",)),
        ("int4", _all(format="sparse-24-bitmask"), ("format is 'sparse-24-bitmask'",)),
        ("int4", _all(format="mixed-precision"), ("config_groups.group_0.format is 'mixed-precision'",)),
        ("int4", _all(sparsity_config={"format": "sparse-bitmask"}), ("sparsity_config is", "sparse are not")),
        ("int4", _all(transform_config={"config_groups": {}}), ("transform_config is",)),
        ("int4", _all(quantization_status="frozen"), ("quantization_status is 'frozen'",)),
        ("int4", _all(kv_cache_scheme={"num_bits": 8, "type": "int"}), ("kv_cache_scheme is", "'float'")),
        ("int4", _all(config_groups={}), ("config_groups is {}; it must be an object",)),
        ("int4", _all(config_groups={"W4A16": ["Linear"]}), ("config_groups.W4A16 is ['Linear']",)),
        ("int4", _all(ignore="lm_head"), ("ignore is 'lm_head'; it must be a list of names",)),
        ("int4", _all(ignore=["re:(", "lm_head"]), ("ignore is 're:('; it must be a regular expression",)),
        ("int4", _all(ignore=["re:.*up_proj"]), ("model.layers.0.mlp.up_proj is stored quantized", "ignores it")),
        ("int4", _group(targets=["re:.*self_attn"]), ("mlp.down_proj is stored quantized", "no target")),
        ("int4", _group(targets=None), ("config_groups.group_0.targets is None",)),
        ("int4", _group(weights=None), ("config_groups.group_0.weights is None",)),
        ("int4", _group(weights=4), ("config_groups.group_0.weights is 4",)),
        ("int4", _group(output_activations={"num_bits": 8}), ("output_activations is {'num_bits': 8}",)),
        ("int4", _weights(num_bits=3), ("group_0: weights in int of 3 bits by group", "pack-quantized, are not supp")),
        ("int4", _weights(num_bits=8), (".weight is [", "weight_packed)")),
        ("int4", _weights(type="float"), ("weights in float of 4 bits by group are not what the format",)),
        ("int4", _weights(type="nf4"), ("weights.type is 'nf4'; it must be one of 'int', 'float'",)),
        ("int4", _weights(strategy="tensor", group_size=None), ("int of 4 bits by tensor",)),
        ("int4", _weights(strategy="block"), ("block_structure is None; it must be given",)),
        ("int4", _weights(strategy="channel"), ("group_size is 32; it must be null where strategy is 'channel'",)),
        ("int4", _weights(group_size="32"), ("weights.group_size is '32'",)),
        ("int4", _weights(group_size=16), (".weight_scale is [", "expected [")),
        ("int4", _weights(strategy="group", group_size=-1), ("group_size is -1; it must be a positive integer where",)),
        ("int4", _weights(symmetric=False), ("zero_point",)),
        ("int4, asymmetric", _weights(symmetric=True), (".weight_zero_point has zero points",)),
        ("nvfp4", _weights(group_size=32), ("weights in float of 4 bits by tensor_group", "are not supported")),
        ("nvfp4", _inputs(group_size=32), ("inputs in float of 4 bits by tensor_group, dynamic",)),
        ("nvfp4", _all(format="mxfp4-pack-quantized"), ("in the format mxfp4-pack-quantized, are not supported",)),
        ("nvfp4", _all(format="mxfp6-pack-quantized"), ("format is 'mxfp6-pack-quantized'",)),
        ("int8, inputs", _inputs(symmetric=False), ("inputs in int of 8 bits by token, asymmetric, dynamic",)),
        ("int8, inputs", _inputs(strategy="tensor"), ("inputs in int of 8 bits by tensor, dynamic",)),
        ("int8, inputs", _inputs(num_bits=4), ("inputs in int of 4 bits by token, dynamic",)),
        ("int8, inputs", _inputs(type="float"), ("inputs in float of 8 bits by token, dynamic",)),
        ("fp8, inputs", _weights(num_bits=4), ("float of 4 bits by channel",)),
        ("fp8, inputs", _weights(strategy="group", group_size=24), ("weight_scale is [",)),
        ("fp8, inputs", _all(format="int-quantized"), ("are not what the format int-quantized holds",)),
    ],
)
def test_what_the_configuration_says(name: str, change: Change, words: tuple[str, ...], tmp_path: Path) -> None:
    _refused(_changed(name, tmp_path, config=change), *words)


def test_patterns_of_large_checkpoints_are_tried() -> None:
    """The patterns of Kimi K2's configuration, on its 70,000 linears; and one of three ``.*``."""
    names = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    linears = [f"model.layers.{index // 1000}.mlp.experts.{index % 1000}.down_proj" for index in range(70_000)]
    found = ByName(dict.fromkeys(read_names([*names, "re:.*layers.*experts.*gate_proj"], "ignore"), True), linears)
    assert not any(map(found.of, linears))
    assert found.of("model.layers.1.mlp.shared_experts.up_proj")


def _without(kind: str) -> Change:
    return lambda tensors: tensors.pop(f"{LINEAR}.{kind}")


def _other(kind: str, made: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"{LINEAR}.{kind}": made(tensors[f"{LINEAR}.{kind}"])})


def _more(**added: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({f"{LINEAR}.{kind}": tensor for kind, tensor in added.items()})


def _spoilt(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[3] = value
        return tensor

    return spoil


def _spoilt_by(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor * factor


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gptq", _without("scales"), (f"no tensor {LINEAR}.scales beside {LINEAR}.qweight",)),
        ("gptq", _without("qweight"), (f"tensor {LINEAR}.g_idx has no place",)),
        ("gptq_v2, ordered", _without("qzeros"), (f"no tensor {LINEAR}.qzeros",)),
        ("gptq_v2, ordered", _without("g_idx"), (f"no tensor {LINEAR}.g_idx",)),
        ("gptq_v2, ordered", _other("g_idx", _spoilt(3)), (f"{LINEAR}.g_idx names group 3; there are 3 groups",)),
        ("gptq_v2, ordered", _other("g_idx", _spoilt(-1)), (f"{LINEAR}.g_idx names group -1",)),
        ("gptq_v2, ordered", _other("g_idx", lambda index: index[:-8]), ("group_index is [88]; expected [96]",)),
        ("gptq_v2, ordered", _other("g_idx", lambda index: index[:0]), ("g_idx is torch.int32 [0]; one dimension",)),
        ("gptq", _other("qweight", lambda words: words[:0]), (f"{LINEAR}.qweight is torch.int32 [0, 64]",)),
        ("gptq_v2, ordered", _other("g_idx", lambda index: index.float()), ("g_idx is torch.float32 [96]",)),
        ("gptq", _other("qweight", lambda words: words[:-1]), (f"{LINEAR}.weight is [32, 88]; expected [32, 96]",)),
        ("gptq", _other("qweight", lambda words: words[:, :-1]), (f"{LINEAR}.qweight has 63 outputs",)),
        ("gptq", _other("qweight", lambda words: words.long()), (f"{LINEAR}.qweight is torch.int64",)),
        ("gptq", _other("qweight", lambda words: words[0]), (f"{LINEAR}.qweight is torch.int32 [64]",)),
        ("gptq", _other("scales", _spoilt(-1)), (f"{LINEAR}.weight_scale has -1.0", f"calls it {LINEAR}.scales)")),
        ("gptq", _other("scales", _spoilt(float("nan"))), (f"{LINEAR}.weight_scale has nan",)),
        ("gptq", _other("scales", lambda scales: scales.int()), (f"{LINEAR}.scales is torch.int32",)),
        ("gptq, 8 bits", _other("scales", lambda scales: scales.repeat(2, 1)), ("scales of one group are expected",)),
        ("gptq", _more(weight=torch.ones(64, 96)), (f"tensors {LINEAR}.weight and {LINEAR}.qweight are the same",)),
        ("awq", _without("qzeros"), (f"no tensor {LINEAR}.qzeros beside {LINEAR}.qweight",)),
        ("awq", _other("qzeros", lambda zeros: zeros[:, :-1]), ("zero_point is [56, 3]; expected [64, 3]",)),
        ("fp8 by blocks", _without("weight_scale_inv"), (f"{LINEAR}.weight is torch.float8_e4m3fn",)),
        ("fp8 by blocks", _without("weight"), (f"no tensor {LINEAR}.weight beside {LINEAR}.weight_scale_inv",)),
        ("fp8 by blocks", _other("weight_scale_inv", lambda one: one.to(torch.int8)), ("exponents in bytes, are exp",)),
        ("fp8 by blocks", _other("weight", lambda weight: weight.float()), (f"{LINEAR}.weight is torch.float32",)),
        ("fp8 by tensors", _without("activation_scale"), (f"no tensor {LINEAR}.activation_scale, and",)),
        ("int4", _without("weight_scale"), (f"no tensor {LINEAR}.weight_scale beside",)),
        ("int4", _other("weight_shape", lambda shape: shape[:1]), (f"{LINEAR}.weight_shape is torch.int64 [1]",)),
        ("int4, asymmetric", _without("weight_zero_point"), (f"no tensor for {LINEAR}.zero_point",)),
        ("int8, inputs", _other("weight_scale", lambda one: one.int()), (f"{LINEAR}.weight_scale is torch.int32",)),
        ("int8, inputs", _other("weight_scale", lambda one: one[:9]), ("weight_scale is [9, 1]; expected [64, 1]",)),
        ("nvfp4", _without("weight_global_scale"), (f"no tensor for {LINEAR}.weight_divisor",)),
        ("nvfp4", _without("input_global_scale"), (f"no tensor for {LINEAR}.input_scale",)),
        ("nvfp4", _other("weight_global_scale", _spoilt_by(0)), (f"{LINEAR}.weight_divisor is 0.0", "weight_global")),
        ("mxfp4", _other("weight_scale", _spoilt(255)), (f"{LINEAR}.weight_scale has the exponent 255",)),
        ("fp8, static", _without("input_scale"), (f"no tensor for {LINEAR}.input_scale",)),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_wrong(name: str, change: Change, words: tuple[str, ...], tmp_path: Path) -> None:
    _refused(_changed(name, tmp_path, tensors=change), *words)


def test_zero_points_in_eight_bit_floats_are_looked_at() -> None:
    require_zeros(torch.zeros(3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="has zero points"):
        require_zeros(torch.ones(3).to(torch.float8_e4m3fn))
