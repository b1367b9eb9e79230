"""A small checkpoint of any architecture in any format: its linears packed, and the same with the decoded weights."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from inflight.engine.checkpoint import load_config
from inflight.engine.models.naming import CheckpointNames
from inflight.export.plan.shape import linears
from tests.engine.support.checkpoints import checkpoint
from tests.engine.support.packed_models import FORMATS


@functools.cache
def packed(name: str, form: str) -> tuple[Path, Path]:
    """Return a checkpoint in a format of ``FORMATS``, and one with the weights that it stands for.

    ``name``: a key of ``checkpoints.ARCHITECTURES``. What lies in one tensor of all experts stays as it is, as routers
    do, and linears whose inputs are no whole groups.
    """
    source = checkpoint(name)
    tensors = load_file(source / "model.safetensors")
    config = load_config(source)
    naming, plain = (CheckpointNames(config, names).of("model.") for names in (tensors.keys(), ()))
    described, pack, _ = FORMATS[form]
    decoded, stored, left_out = dict(tensors), dict(tensors), ["lm_head"]
    for linear in linears(config):
        module = naming + linear.name.removeprefix(plain)
        weight = tensors.get(f"{module}.weight")
        if weight is None or linear.outputs < 16 or linear.inputs % 32 or linear.outputs % 8 or _is_router(module):
            left_out.append(module)
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
