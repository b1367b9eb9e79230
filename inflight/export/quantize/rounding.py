"""Rounds the weights of a checkpoint to INT8, each group of a row's inputs by its own scale; inputs stay as they are.

Nothing is calibrated: a group's largest value becomes 127. Rows with a single scale would lose twice as much. The
checkpoint is compressed-tensors' (``pack-quantized``), which the portable engine reads as any other of that format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from inflight.engine.models.naming import CheckpointNames
from inflight.engine.weight_files import INDEX
from inflight.errors import DeploymentError
from inflight.export.checkpoint import Checkpoint
from inflight.export.plan.shape import split_excluded
from inflight.export.plan.stored import tensor_names
from inflight.export.quantize.config_file import NAME, write_config
from inflight.export.quantize.modelopt import Recipe, copy_text_files
from inflight.export.stages import Progress, tracked

_LARGEST = 127.0
_WORD = 4
"""Bytes of a word, into which integers are packed."""


def round_checkpoint(source: Checkpoint, recipe: Recipe, target: Path, progress: Progress) -> None:
    """Write a checkpoint to the directory ``target``, file by file, with its linears in INT8 but for those kept.

    Raises:
        DeploymentError: a linear's weight is in no file.
        OSError: the disk is full or the directory cannot be written.
    """
    names = _names(source, recipe.keep)
    left, places = set(names), dict[str, str]()
    for file in tracked(source.weights, "rounding the weights", progress):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  # it is no mapping
                module, _, kind = name.rpartition(".")
                if kind == "weight" and module in left:
                    left.remove(module)
                    packed = pack(stored.get_tensor(name), recipe.group)
                    tensors |= {f"{module}.{part}": tensor for part, tensor in packed.items()}
                else:
                    tensors[name] = stored.get_tensor(name)
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
    if left:
        raise DeploymentError(f"{source.directory}: no file has {min(left)}.weight")
    if (source.directory / INDEX).is_file():
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}, indent=1))
    described = {"quantization_config": _described(names, recipe)}
    (target / NAME).write_text(json.dumps(described), encoding="utf-8")
    write_config(source.directory, target)
    copy_text_files(source.directory, target)


def _names(source: Checkpoint, keep: tuple[str, ...]) -> list[str]:
    """Return the linears to round, by their names in the checkpoint; that of a backbone lacks a prefix."""
    quantized, _ = split_excluded(source.config, keep)
    stored, usual = (
        CheckpointNames(source.config, names).of("model.") for names in (tensor_names(source.directory), ())
    )
    return [stored + one.name.removeprefix(usual) for one in quantized]


def pack(weight: Tensor, group: int) -> Mapping[str, Tensor]:
    """Return a weight ``[rows, columns]`` as compressed-tensors stores it: words, scales by groups, and its shape."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // group, group)
    scales = (groups.abs().amax(-1) / _LARGEST).to(torch.bfloat16)
    # By the scale as it is stored; a group of zeros has one of 0.
    steps = groups / scales.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    codes = (steps.round().clamp(-_LARGEST, _LARGEST) + 128).to(torch.uint8).view(rows, columns)
    return {
        "weight_packed": codes.view(rows, columns // _WORD, _WORD).contiguous().view(torch.int32).squeeze(-1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }


def _described(names: Collection[str], recipe: Recipe) -> Mapping[str, object]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": recipe.group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": sorted(names), "weights": weights, "input_activations": None}},
        "ignore": ["lm_head", *recipe.keep],
    }
