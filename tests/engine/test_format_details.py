"""What formats that others publish leave to their files: scales in bytes, groups without an order, cache scales."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from inflight.engine.quant.readers.methods import READERS
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from tests.engine.support.packed_linears import MODULE, Integers, load_linear, packed_by_libraries, read
from tests.engine.support.packed_models import published

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}


def _e4m3(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_decode_as_in_transformers(kind: torch.dtype, dtype: torch.dtype) -> None:
    weight = _e4m3(64, 48)
    exponents = torch.randint(100, 130, (2, 3), dtype=torch.uint8)
    floats = torch.rand(2, 3) + 0.5
    scales = exponents.view(kind) if kind.itemsize == 1 else floats.to(kind)
    linear = load_linear(FP8, {"weight": weight, "weight_scale_inv": scales}, 64, 48)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=dtype)
    assert torch.equal(linear.decode(dtype), expected)


def test_the_last_blocks_are_as_large_as_what_is_left() -> None:
    weight, scales = _e4m3(70, 40), torch.rand(3, 3) + 0.5
    linear = load_linear(FP8, {"weight": weight, "weight_scale_inv": scales}, 70, 40)
    decoded = linear.decode(torch.float32)
    assert decoded[69, 39] == weight[69, 39].float() * scales[2, 2]
    assert torch.equal(decoded[:64, :32], Fp8Dequantize(None)._dequantize_one(weight[:64, :32], scales[:2, :2]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("form", "less"), [("gptq", 1), ("gptq_v2", 0)])
def test_zeros_of_every_value(bits: int, form: str, less: int) -> None:
    """Less one they are taken modulo their range: a zero of zero is stored as the largest."""
    count, generator = 1 << bits, torch.Generator().manual_seed(2)
    values = torch.randint(0, count, (count, 16), generator=generator).numpy()
    made = Integers(values, torch.ones(count, 1).numpy(), torch.arange(count)[:, None].numpy(), values[0] * 0, bits)
    tensors = {name: torch.from_numpy(one.copy()) for name, one in made.gptq(less).items()}
    config = GPTQ | {"bits": bits, "checkpoint_format": form}
    linear = load_linear(config, tensors | {"g_idx": torch.zeros(16, dtype=torch.int32)}, count, 16)
    assert torch.equal(linear.decode(torch.float32), torch.from_numpy(made.decoded()))


@pytest.mark.parametrize("unset", [False, True])
def test_a_group_index_of_compressed_tensors(unset: bool) -> None:
    """Releases before 0.20 wrote it; minus one for an input means that groups lie in a row."""
    case = packed_by_libraries()["compressed, int4, asymmetric"]
    index = torch.tensor([0, 1]).repeat(32).int()
    tensors = case["tensors"] | {"weight_g_idx": torch.full((64,), -1).int() if unset else index}
    decoded = load_linear(case["config"], tensors, 32, 64).decode(torch.float32)
    if unset:
        assert torch.equal(decoded, case["decoded"])
        return
    # Of the same integers: zeros and scales are those that the other group of columns has.
    integers = load_linear(case["config"], case["tensors"], 32, 64)
    scales, zeros = integers.weight_scale, integers.zero_point
    plain = case["decoded"].unflatten(-1, (2, 32)) / scales[..., None] + zeros[..., None]
    assert torch.equal(decoded, ((plain.flatten(-2).round() - zeros[:, index]) * scales[:, index]))


def test_zero_points_that_are_not_packed() -> None:
    """Beside INT8 weights, which are not packed either."""
    case = packed_by_libraries()["compressed, w8a8, asymmetric"]
    assert case["tensors"]["weight_zero_point"].dtype == torch.int8
    linear = load_linear(case["config"], case["tensors"], 32, 64)
    assert torch.equal(linear.zero_point, case["tensors"]["weight_zero_point"])


def test_targets_decide_in_their_order() -> None:
    """A full name goes before a pattern, and a pattern before what matches any linear."""
    names = frozenset(f"model.layers.0.mlp.{part}_proj.{kind}" for part in ("up", "gate", "down")
                      for kind in ("weight_packed", "weight_scale"))  # fmt: skip
    groups = {
        "any": {"targets": ["Linear"], "weights": {"num_bits": 8, "group_size": 16}},
        "pattern": {"targets": ["re:.*(up|gate)_proj"], "weights": {"num_bits": 4, "group_size": 32}},
        "name": {"targets": ["model.layers.0.mlp.up_proj"], "weights": {"num_bits": 4, "group_size": 64}},
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = READERS["compressed-tensors"](config, names).found
    sizes = {name.split(".")[-1]: (layer.quant_algo, layer.group_size) for name, layer in found.items()}
    assert sizes == {"up_proj": ("W4A16_AWQ", 64), "gate_proj": ("W4A16_AWQ", 32), "down_proj": ("W8A16_GROUPS", 16)}


def test_scales_of_an_fp8_cache(tmp_path: Path) -> None:
    """They lie at the attention; every layer has them, or the start fails."""
    directory = Path(shutil.copytree(published("fp8, static").directory, tmp_path / "model"))
    data = json.loads((directory / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    data["quantization_config"]["kv_cache_scheme"] = scheme | {"group_size": None, "observer": "minmax"}
    (directory / "config.json").write_text(json.dumps(data))
    tensors = load_file(directory / "model.safetensors")
    keys, values = torch.tensor([0.5, 0.25]), torch.tensor([0.125, 2.0])
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = keys[layer : layer + 1].bfloat16()
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = values[layer : layer + 1].bfloat16()
    save_file(tensors, directory / "model.safetensors")
    scales = Scorer(directory, "float32", device="cpu").kv_scales
    assert scales is not None
    assert torch.equal(scales.keys, keys)
    assert torch.equal(scales.values, values)
    del tensors["model.layers.1.self_attn.v_scale"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(DeploymentError, match="no tensor for model.layers.1.self_attn.v_proj.v_scale"):
        Scorer(directory, "float32", device="cpu")


def test_the_rest_of_a_checkpoint_is_taken_as_it_is() -> None:
    case = packed_by_libraries()["awq"]
    quantization, relaid = read(case["config"], case["tensors"] | {"bias": torch.ones(32)})
    assert relaid.names == {f"{MODULE}.{kind}" for kind in ("weight", "weight_scale", "zero_point", "bias")}
    assert quantization.of("lm_head") is None
    seen = dict[str, Tensor]()
    relaid.load({f"{MODULE}.bias"}, lambda name, tensor: seen.update({name: tensor}))
    assert [*seen] == [f"{MODULE}.bias"]
