"""A small checkpoint of any architecture in any format: its linears packed, and the same with the decoded weights."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inflight.engine.checkpoint import load_config
from inflight.engine.models.naming import CheckpointNames
from inflight.export.plan.shape import linears
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.packed_linears import Integers
from tests.engine.support.packed_models import FORMATS, Pack, fp8, int8_rows

_INPUTS = torch.tensor(0.0625)
"""By what inputs are rounded where a checkpoint has a scale for them."""


def _int8(module: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    tensors, decoded = int8_rows(module, weight)
    return {**tensors, "weight_scale": tensors["weight_scale"][:, 0], "input_scale": _INPUTS}, decoded


def _int4(_: str, weight: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    made = Integers.of(weight.numpy(), 4, 32, True, False)
    nibbles = torch.from_numpy(made.values.astype(np.int8) - 8).byte() & 15
    tensors = {"weight": nibbles[0::2] | (nibbles[1::2] << 4), "weight_scale": torch.from_numpy(made.scales).float()}
    return tensors, torch.from_numpy(made.decoded())


_MODELOPT = {"quant_method": "modelopt", "ignore": []}
PACKS: dict[str, tuple[dict[str, Any], Pack]] = {
    "FP8 (ModelOpt)": (_MODELOPT | {"quant_algo": "FP8"}, fp8(0, 0, "weight_scale", input_scale=_INPUTS)),
    "INT8 (ModelOpt)": (_MODELOPT | {"quant_algo": "W8A8_SQ_PER_CHANNEL"}, _int8),
    "INT4 AWQ (ModelOpt)": (_MODELOPT | {"quant_algo": "W4A16_AWQ", "group_size": 32}, _int4),
    "FP8 by blocks": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8(16, 32, "weight_scale_inv")),
    **{
        name: FORMATS[known][:2]
        for name, known in {
            "FP8 (compressed-tensors)": "fp8, inputs",
            "INT8 (compressed-tensors)": "int8, inputs",
            "INT4 (compressed-tensors)": "int4, asymmetric",
            "MXFP4 (compressed-tensors)": "mxfp4",
            "NVFP4 (compressed-tensors)": "nvfp4",
            "GPTQ": "gptq",
            "GPTQ, `desc_act`": "gptq_v2, ordered",
            "AWQ": "awq",
        }.items()
    },
}
"""By the table's names of formats: the configuration, and how a linear is packed."""


@functools.cache
def packed(name: str, form: str) -> tuple[Path, Path]:
    """Return a checkpoint in a format of ``PACKS``, and one with the weights that it stands for.

    ``name``: a key of ``checkpoints.ARCHITECTURES``. What lies in one tensor of all experts stays as it is, as routers
    do, and linears whose inputs are no whole groups.
    """
    source = checkpoint(name)
    tensors = load_file(source / "model.safetensors")
    config = load_config(source)
    naming, plain = (CheckpointNames(config, names).of("model.") for names in (tensors.keys(), ()))
    described, pack = PACKS[form]
    decoded, stored, left_out = dict(tensors), dict(tensors), ["lm_head"]
    for linear in linears(config):
        module = naming + linear.name.removeprefix(plain)
        weight = tensors.get(f"{module}.weight")
        if weight is None or linear.outputs < 16 or linear.inputs % 32 or linear.outputs % 8 or _is_router(module):
            above = module.rpartition(".")[0]
            left_out += [module, f"{above}.gate_up_proj"]  # as the engine calls what has the experts in one tensor
            continue
        made, decoded[f"{module}.weight"] = pack(module, weight)
        del stored[f"{module}.weight"]
        stored |= {f"{module}.{kind}": torch.as_tensor(tensor).contiguous() for kind, tensor in made.items()}
    return (
        _write(source, stored, described | ({"ignore": left_out} if "ignore" in described else {})),
        _write(source, decoded, None),
    )


def _is_router(module: str) -> bool:
    return module.endswith((".gate", ".router", ".shared_expert_gate", ".router.proj"))


def _write(source: Path, tensors: dict[str, Any], quantization: dict[str, Any] | None) -> Path:
    directory = Path(tempfile.mkdtemp(dir=_folder().name))
    shutil.copytree(source, directory, dirs_exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    if quantization is not None:
        config = json.loads((directory / "config.json").read_text()) | {"quantization_config": quantization}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-packed-")
