"""What a deployment's files must be for TensorRT-LLM 1.2 to serve them right; what it would misread is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from inflight.deployment import Deployment
from inflight.errors import DeploymentError
from inflight.text.checkpoint import read_json

_OWN = {"rope_theta": 10_000, "partial_rotary_factor": 1}
"""What transformers 4.57, with which TensorRT-LLM 1.2 reads, takes where ``config.json`` has no such key."""


def check_adapters(deployment: Deployment) -> None:
    """Check that the LoRA adapters are there and alike.

    Raises:
        DeploymentError: names the adapter and what is wrong with it.
    """
    settings = deployment.tensorrt_llm
    targets: dict[str, str] = {}
    for name, path in settings.lora.items():
        config = read_json(path / "adapter_config.json")
        rank = config.get("r")
        if not isinstance(rank, int) or rank > settings.max_lora_rank:
            raise DeploymentError(
                f"tensorrt_llm.lora.{name} has rank {rank}; max_lora_rank is {settings.max_lora_rank}"
            )
        modules = config.get("target_modules")
        targets[name] = json.dumps(sorted(modules) if isinstance(modules, list) else modules)
    if len(set(targets.values())) > 1:
        raise DeploymentError(f"tensorrt_llm.lora: the adapters must adapt the same modules; they adapt {targets}")


def check_positions(deployment: Deployment) -> None:
    """Check a deployment's checkpoints, that of its drafts included; see ``check_positions_of``."""
    for directory in (deployment.model, deployment.speculation.draft_model):
        if directory is not None:
            check_positions_of(directory)


def check_positions_of(checkpoint: Path) -> None:
    """Check that TensorRT-LLM reads the positions' encoding of a checkpoint as it was written.

    transformers 5 writes it as ``rope_parameters``, and 4.57 takes no notice of that key: it would compute with its own
    default, and the text would be wrong without a word.

    Raises:
        DeploymentError: names the keys that are missing.
    """
    path = checkpoint / "config.json"
    config = read_json(path)
    for part in (config, config.get("text_config") or {}):
        if lost := list(misread(part)):
            raise DeploymentError(
                f"{path} has {', '.join(lost)} in rope_parameters alone; transformers 4.57, with which "
                "TensorRT-LLM 1.2 reads it, knows rope_theta, partial_rotary_factor and rope_scaling alone: write "
                "them beside it, or take the original checkpoint's config.json"
            )


def misread(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what ``rope_parameters`` of a ``config.json`` says otherwise than what 4.57 would make of the rest."""
    written = config.get("rope_parameters")
    if not isinstance(written, Mapping):
        return
    by_layer = [one for one in written.values() if isinstance(one, Mapping)]
    for one in by_layer or [written]:
        for name, own in _OWN.items():
            if name not in config and (value := one.get(name, own)) != own:
                yield f"{name} {value:g}" if isinstance(value, int | float) else f"{name} {json.dumps(value)}"
        kind = one.get("rope_type", "default")
        if not config.get("rope_scaling") and kind != "default":
            yield f"rope_type {kind}"


def brings_code(deployment: Deployment) -> bool:
    """Return whether the checkpoint names code of its own for its model, which is never run."""
    return "auto_map" in read_json(deployment.model / "config.json")
