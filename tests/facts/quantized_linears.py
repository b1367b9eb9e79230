"""Writes ``quantized_linears.json``: small linears as the libraries of each format pack them, and as they decode them.

Run it with the libraries on the path, unpacked without what they need beside PyTorch:

    pip install --no-deps --target libraries compressed-tensors==0.20.0 loguru auto-gptq==0.7.1
    pip download --no-deps autoawq==0.2.9  # and unpack it into the same directory
    PYTHONPATH=libraries python tests/facts/quantized_linears.py tests/facts/quantized_linears.json

Scales are numbers that float16, or bfloat16, has, and weights are decoded in float32. Bytes are compressed by zlib and
written in base85.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
import json
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROWS, COLUMNS, TOKENS = 32, 64, 5


def _encoded(tensor: Tensor) -> dict[str, Any]:
    octets = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    data = base64.b85encode(zlib.compress(octets, 9)).decode()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}


def _unopened(package: str) -> None:
    """Make the modules of a package importable without its ``__init__``, which needs CUDA and much else."""
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    sys.modules[package] = module


def _scales(*shape: int) -> Tensor:
    """Return scales of seven bits, so that they are exact in any type."""
    return torch.randint(64, 128, shape).float() / 2**13


def _gptq(bits: int, group: int, sym: bool, desc_act: bool) -> dict[str, Any]:
    """Have AutoGPTQ pack a linear, and multiply it by the identity."""
    _unopened("auto_gptq")
    qlinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    size = COLUMNS if group == -1 else group
    groups, largest = COLUMNS // size, 2**bits - 1
    scales = _scales(ROWS, groups) / (1 if bits == 4 else 16)
    # A zero of 0 would be stored as -1, whose bits AutoGPTQ writes over those of its neighbours.
    zeros = torch.full((ROWS, groups), (largest + 1) / 2) if sym else torch.randint(1, largest + 1, (ROWS, groups))
    index = torch.arange(COLUMNS) // size
    index = index[torch.randperm(COLUMNS)] if desc_act else index
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    values = torch.randint(0, largest + 1, (ROWS, COLUMNS))
    linear.weight.data = (values - zeros.float()[:, index]) * scales[:, index]
    packed = qlinear(bits, group, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
    packed.pack(linear, scales, zeros.float(), index.int())
    decoded = packed(torch.eye(COLUMNS)).t()
    assert torch.equal(decoded, linear.weight)
    kept = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales.half(), "g_idx": packed.g_idx}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": desc_act}
    return {"config": config | {"checkpoint_format": "gptq"}, "tensors": kept, "decoded": decoded}


def _awq(group: int) -> dict[str, Any]:
    """Have AutoAWQ pack a linear, and decode it."""
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        _unopened(package)
    stub = types.ModuleType("awq.utils.utils")
    stub.get_best_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["awq.utils.utils"] = stub
    gemm = importlib.import_module("awq.modules.linear.gemm")
    size = COLUMNS if group == -1 else group
    scales, zeros = _scales(COLUMNS // size, ROWS), torch.randint(0, 16, (COLUMNS // size, ROWS))
    index = torch.arange(COLUMNS) // size
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = ((torch.randint(0, 16, (COLUMNS, ROWS)) - zeros[index]) * scales[index]).t().contiguous()
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, size, scales=scales, zeros=zeros)
    decoded = gemm.dequantize_gemm(packed.qweight, packed.qzeros, scales, 4, size).t()
    assert torch.equal(decoded, linear.weight)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
    return {"config": config, "tensors": tensors, "decoded": decoded}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Have compressed-tensors compress a linear, decompress it, and round its inputs."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, forward_quantize
    from compressed_tensors.quantization.quant_config import QuantizationStatus

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
    )
    args = scheme.weights
    sizes = {
        "tensor": (1,), "channel": (ROWS, 1), "group": (ROWS, COLUMNS // (args.group_size or COLUMNS)),
        "block": (ROWS // 16, COLUMNS // 32),
    }  # fmt: skip
    sizes["tensor_group"] = sizes["group"]
    shape = sizes[args.strategy]
    largest = {"float": {8: 448, 4: 6}, "int": {8: 127, 4: 7}}[args.type][args.num_bits]
    state = {
        "weight": torch.randn(ROWS, COLUMNS) * 0.02,
        "weight_scale": (_scales(*shape) * (6 / largest)).bfloat16().float(),
    }
    if not args.symmetric:
        state["weight_zero_point"] = torch.randint(-largest - 1, largest + 1, shape).to(torch.int8)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = torch.tensor([1000.0 / 3])
        state["weight_scale"] = (state["weight_scale"] * 1000 / 3).to(torch.float8_e4m3fn).float()
    if form.startswith("mxfp4"):
        state["weight_scale"] = state["weight_scale"].log2().floor().exp2()
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = dict(compressor.compress(state, scheme))
    decoded = compressor.decompress(tensors, scheme)["weight"]
    if args.strategy == "tensor_group":  # it would decode to bfloat16
        values = unpack_fp4_from_uint8(tensors["weight_packed"], ROWS, COLUMNS, torch.float32)
        scales, divisor = tensors["weight_scale"].float(), tensors["weight_global_scale"]
        float32 = dequantize(values, scales, args=args, global_scale=divisor, dtype=torch.float32)
        assert torch.equal(float32.bfloat16(), decoded)
        decoded = float32
    case = {"tensors": tensors, "decoded": decoded.float()}
    if scheme.input_activations is not None:
        module = nn.Linear(COLUMNS, ROWS)
        module.quantization_status = QuantizationStatus.COMPRESSED
        if scheme.input_activations.dynamic is False:
            tensors["input_scale"] = torch.tensor([0.0234375])
            module.input_scale = nn.Parameter(tensors["input_scale"])
        if scheme.input_activations.strategy == "tensor_group":
            tensors["input_global_scale"] = torch.tensor([77.0])
            module.input_global_scale = nn.Parameter(tensors["input_global_scale"], requires_grad=False)
        case["inputs"] = torch.randn(TOKENS, COLUMNS) * torch.tensor([1.0, 0.01, 30.0, 0.0, 1.0])[:, None]
        rounded = forward_quantize(module, case["inputs"][None], "input", scheme.input_activations)
        case["rounded"] = rounded[0]
    if tensors["weight_scale"].dtype == torch.float32:
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()  # as files have them; they lose nothing
    group = scheme.model_dump(mode="json", exclude_none=True)
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {"config": config | {"quantization_status": "compressed"}, **case}


def _cases() -> dict[str, dict[str, Any]]:
    int4, int8 = {"num_bits": 4, "type": "int"}, {"num_bits": 8, "type": "int"}
    groups, rows = {"strategy": "group", "group_size": 32}, {"strategy": "channel"}
    float8 = {"num_bits": 8, "type": "float"}
    token, tensor = {"strategy": "token", "dynamic": True}, {"strategy": "tensor"}
    asymmetric = {"symmetric": False}
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    nvfp4["scale_dtype"] = torch.float8_e4m3fn
    packed, whole, floats = "pack-quantized", "int-quantized", "float-quantized"
    return {
        "gptq, 4 bits": _gptq(4, 32, True, False),
        "gptq, 4 bits, ordered": _gptq(4, 16, True, True),
        "gptq, 4 bits, asymmetric": _gptq(4, 16, False, False),
        "gptq, 4 bits, asymmetric, ordered": _gptq(4, 32, False, True),
        "gptq, 4 bits, one group": _gptq(4, -1, True, False),
        "gptq, 8 bits": _gptq(8, 32, True, False),
        "gptq, 8 bits, one group": _gptq(8, -1, True, False),
        "gptq, 8 bits, asymmetric, ordered": _gptq(8, 16, False, True),
        "awq": _awq(32),
        "awq, one group": _awq(-1),
        "compressed, int4": _compressed(packed, int4 | groups),
        "compressed, int4, asymmetric": _compressed(packed, int4 | groups | asymmetric),
        "compressed, int4, rows": _compressed(packed, int4 | rows),
        "compressed, int8": _compressed(packed, int8 | groups),
        "compressed, int8, rows": _compressed(packed, int8 | rows),
        "compressed, int8, asymmetric": _compressed(packed, int8 | rows | asymmetric),
        "compressed, w8a8": _compressed(whole, int8 | rows, int8 | token),
        "compressed, w8a8, static": _compressed(whole, int8 | rows, int8 | tensor),
        "compressed, w8a8, asymmetric": _compressed(whole, int8 | rows | asymmetric, int8 | token),
        "compressed, int8 alone": _compressed("naive-quantized", int8 | rows),
        "compressed, fp8": _compressed(floats, float8 | rows, float8 | token),
        "compressed, fp8, static": _compressed(floats, float8 | tensor, float8 | tensor),
        "compressed, fp8, static, rows": _compressed(floats, float8 | rows, float8 | tensor),
        "compressed, fp8 alone": _compressed("naive-quantized", float8 | rows),
        "compressed, fp8, blocks": _compressed(
            floats,
            float8 | {"strategy": "block", "block_structure": [16, 32]},
            float8 | {"strategy": "group", "group_size": 32, "dynamic": True},
        ),
        "compressed, nvfp4": _compressed("nvfp4-pack-quantized", nvfp4, nvfp4 | {"dynamic": "local"}),
        "compressed, nvfp4 alone": _compressed("nvfp4-pack-quantized", nvfp4),
        "compressed, mxfp4 alone": _compressed(
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        ),
    }  # fmt: skip


def main() -> None:
    """Write the file that is named."""
    torch.manual_seed(0)
    written = {
        name: {
            kind: value
            if kind == "config"
            else {key: _encoded(tensor) for key, tensor in value.items()}
            if isinstance(value, dict)
            else _encoded(value)
            for kind, value in case.items()
        }
        for name, case in _cases().items()
    }
    Path(sys.argv[1]).write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
