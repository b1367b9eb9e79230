"""Small random checkpoints in the formats that others publish, and transformers' models with the decoded weights."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.engine.support.checkpoints import SMALL
from tests.engine.support.packed_linears import Integers, blocks_of_e4m3

_SIZE: dict[str, Any] = SMALL | {"num_hidden_layers": 2}
_STATIC, _DIVISOR = torch.tensor([0.0625]), torch.tensor([40.0])
"""By what inputs are rounded where a checkpoint has a scale for them; of NVFP4, what scales are divided by."""
_E2M1 = torch.tensor([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
Pack = Callable[[str, Tensor], tuple[Mapping[str, Any], Tensor]]
"""Returns the tensors of a linear, of its name and weight, and what they stand for."""
Round = Callable[[str, Tensor], Tensor]
"""Returns what is multiplied, of a linear's name and input."""


@dataclass(frozen=True)
class Published:
    """A checkpoint, and what it stands for."""

    directory: Path
    model: Any
    """transformers' model, in float64; linears round their inputs as the format says."""

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        """Return ``[len(tokens), vocab]``, computed in float64."""
        logits: Tensor = self.model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return logits


def _integers(bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Callable[[Tensor], Integers]:
    return lambda weight: Integers.of(weight.numpy(), bits, group, symmetric, shuffled)


def _gptq(bits: int, group: int, symmetric: bool, shuffled: bool, less: int) -> Pack:
    def pack(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
        made = _integers(bits, group, symmetric, shuffled)(weight)
        return made.gptq(less), torch.from_numpy(made.decoded())

    return pack


def _awq(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    made = _integers(4, 32, False)(weight)
    return made.awq(), torch.from_numpy(made.decoded())


def _compressed(bits: int, group: int, symmetric: bool) -> Pack:
    def pack(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
        made = _integers(bits, group, symmetric)(weight)
        return made.compressed(symmetric), torch.from_numpy(made.decoded())

    return pack


def int8_rows(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    """Return the tensors of a linear in INT8 with a scale for each row, and the weight that they stand for."""
    made = _integers(8, -1, True)(weight)
    signed = torch.from_numpy((made.values - 128).astype(np.int8))
    return {"weight": signed, "weight_scale": torch.from_numpy(made.scales)}, torch.from_numpy(made.decoded())


def fp8(rows: int, columns: int, scale: str, **more: Tensor) -> Pack:
    """Return what packs a linear in E4M3, with a scale for each block of rows and columns; 0: all of them."""

    def pack(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
        size = rows or len(weight), columns or weight.shape[1]
        stored, scales, decoded = blocks_of_e4m3(weight, *size)
        return {"weight": stored, scale: scales if rows or columns else scales[0]} | more, decoded

    return pack


def _e2m1(block: int) -> Pack:
    """By blocks, each with E4M3 for a scale, divided by one number; or with a power of two, where they are of 32."""

    def pack(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
        blocks = weight.unflatten(-1, (-1, block))
        largest, divisor = blocks.abs().amax(-1) / 6, torch.tensor([300.0])
        scales = (largest * divisor).to(torch.float8_e4m3fn)
        exact = scales.float() / divisor
        if block == 32:
            exponents = largest.log2().ceil()
            scales, exact = (exponents + 127).byte(), exponents.exp2()
        steps = (blocks / exact[..., None])[..., None]
        places = (steps - _E2M1).abs().argmin(-1).byte().flatten(-2)
        decoded = _E2M1[places.int()].unflatten(-1, (-1, block)) * exact[..., None]
        tensors = {"weight_packed": places[:, 0::2] | (places[:, 1::2] << 4), "weight_scale": scales}
        globals_ = {"weight_global_scale": divisor, "input_global_scale": _DIVISOR} if block == 16 else {}
        return tensors | globals_, decoded.flatten(-2)

    return pack


def _by_blocks(_: str, x: Tensor) -> Tensor:
    """Round inputs to NVFP4."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (_DIVISOR * (blocks.abs().amax(-1, keepdim=True) / 6)).to(torch.float8_e4m3fn).float() / _DIVISOR
    steps = torch.where(scales == 0, 0, blocks / scales)
    size = torch.where(steps.abs() < 2, 0.5, torch.where(steps.abs() < 4, 1.0, 2.0))
    return ((steps / size).round() * size * scales).flatten(-2).to(x.dtype)


def _mixed(name: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    """Query and key in E4M3 and INT4, value as it is; all else in INT4."""
    if name.endswith("v_proj"):
        return {"weight": weight}, weight
    return (fp8(1, 0, "weight_scale") if name.endswith("q_proj") else _compressed(4, 32, True))(name, weight)


def _by_token(largest: float, to: Callable[[Tensor], Tensor]) -> Round:
    """Round by the largest input of each token; ``to`` rounds multiples of the scale."""

    def rounded(_: str, x: Tensor) -> Tensor:
        scale = x.float().abs().amax(-1, keepdim=True) / largest
        return (to(x.float() / scale) * scale).to(x.dtype)

    return rounded


def _to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _to_int8(x: Tensor) -> Tensor:
    return x.clamp(-128, 127).round()


def _by_one(scale: float) -> Round:
    return lambda _, x: (_to_e4m3(x.float() / scale) * scale).to(x.dtype)


def _config(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return config | {"config_groups": {"group_0": group}, "quantization_status": "compressed"} | more


_INT4, _INT8 = {"num_bits": 4, "type": "int", "symmetric": True}, {"num_bits": 8, "type": "int", "symmetric": True}
_GROUPS = {"strategy": "group", "group_size": 32}
_FLOAT8, _ROWS = {"num_bits": 8, "type": "float", "symmetric": True}, {"strategy": "channel"}
_TOKENS, _ALL = {"strategy": "token", "dynamic": True}, {"strategy": "tensor"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MIXED_GROUPS = {
    "group_0": {"targets": ["Linear"], "weights": _INT4 | _GROUPS, "format": "pack-quantized"},
    "group_1": {"targets": ["re:.*self_attn\\.q_proj$"], "weights": _FLOAT8 | _ROWS, "format": "naive-quantized"},
}
FORMATS: dict[str, tuple[dict[str, Any], Pack, Round | None]] = {
    "gptq": (_GPTQ | {"checkpoint_format": "gptq"}, _gptq(4, 32, True, False, 1), None),
    "gptq_v2, ordered": (
        _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "desc_act": True},
        _gptq(4, 32, False, True, 0),
        None,
    ),
    "gptq, one group": (_GPTQ | {"group_size": -1}, _gptq(4, -1, True, False, 1), None),
    "gptq, 8 bits": (_GPTQ | {"bits": 8, "group_size": -1}, _gptq(8, -1, True, False, 1), None),
    "gptq, 8 bits, asymmetric": (_GPTQ | {"bits": 8, "sym": False}, _gptq(8, 32, False, False, 1), None),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, _awq, None),
    "int4": (_config(_INT4 | _GROUPS, None, "pack-quantized"), _compressed(4, 32, True), None),
    "int4, asymmetric": (
        _config(_INT4 | _GROUPS | {"symmetric": False}, None, "pack-quantized"),
        _compressed(4, 32, False),
        None,
    ),
    "int8": (_config(_INT8 | _ROWS, None, "pack-quantized"), _compressed(8, -1, True), None),
    "int8, inputs": (
        _config(_INT8 | _ROWS, _INT8 | _TOKENS, "int-quantized"),
        int8_rows,
        _by_token(127.5, _to_int8),
    ),
    "fp8, inputs": (
        _config(_FLOAT8 | _ROWS, _FLOAT8 | _TOKENS, "float-quantized"),
        fp8(1, 0, "weight_scale"),
        _by_token(448, _to_e4m3),
    ),
    "fp8, static": (
        _config(_FLOAT8 | _ALL, _FLOAT8 | _ALL | {"dynamic": False}, "float-quantized"),
        fp8(0, 0, "weight_scale", input_scale=_STATIC),
        _by_one(_STATIC.item()),
    ),
    "nvfp4": (_config(_NVFP4, _NVFP4 | {"dynamic": "local"}, "nvfp4-pack-quantized"), _e2m1(16), _by_blocks),
    "mxfp4": (
        _config({"num_bits": 4, "type": "float", "group_size": 32}, None, "mxfp4-pack-quantized"),
        _e2m1(32),
        None,
    ),
    "mixed": (
        _config({}, None, "mixed-precision", ignore=["lm_head", "re:.*v_proj"], config_groups=_MIXED_GROUPS),
        _mixed,
        None,
    ),
    "fp8 by blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 32], "fmt": "e4m3"}
        | {"modules_to_not_convert": ["lm_head"]},
        fp8(40, 32, "weight_scale_inv"),
        None,
    ),
    "fp8 by tensors": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8(0, 0, "weight_scale_inv", activation_scale=_STATIC[0]),
        _by_one(_STATIC.item()),
    ),
}  # fmt: skip
"""By name: the configuration, how a linear is packed, and how its inputs are rounded."""


@functools.cache
def published(name: str, kind: str = "Llama", **special: Any) -> Published:
    """Return a checkpoint in a format, all of whose linears are quantized but ``lm_head``; made once per session."""
    config, pack, rounded = FORMATS[name]
    model = _random_model(kind, **special)
    directory = Path(_folder().name) / f"{name}-{kind}-{len(special)}"
    model.save_pretrained(directory)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for module, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and module != "lm_head":
            packed, decoded = pack(module, tensors.pop(f"{module}.weight"))
            tensors |= {f"{module}.{one}": torch.as_tensor(tensor).contiguous() for one, tensor in packed.items()}
            linear.weight.data = decoded
            if rounded is not None:
                _round_inputs(linear, module, rounded)
    save_file({one: tensor.clone() for one, tensor in tensors.items()}, directory / "model.safetensors")
    described = json.loads((directory / "config.json").read_text()) | {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(described))
    return Published(directory, model.double())


def _random_model(kind: str, **special: Any) -> Any:
    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**(_SIZE | special), architectures=[f"{kind}ForCausalLM"])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def _round_inputs(linear: nn.Linear, name: str, rounded: Round) -> None:
    linear.register_forward_pre_hook(lambda _module, inputs: (rounded(name, inputs[0]),))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-published-")
