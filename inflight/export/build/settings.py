"""What deployment.yaml will say: what follows from the plan, and over it what the user sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.deployment import QualitySettings, read_settings
from inflight.errors import DeploymentError
from inflight.export.checkpoint import Checkpoint
from inflight.export.plan.plan import Plan
from inflight.manifest import Flow

MODEL, ENGINE = "model", "engine"
"""Directories within a deployment."""
_DTYPES = {"float32": "float32", "bf16": "bfloat16"}
_DECIDED = {
    ("engine", "kind"): "--engine",
    ("tensorrt_llm", "tensor_parallel_size"): "--tensor-parallel",
    ("tensorrt_llm", "pipeline_parallel_size"): "--gpus",
    ("tensorrt_llm", "engine_dir"): "--flow",
    ("kv_cache", "dtype"): "--kv-cache",
}
"""Settings that the plan and the engine follow from: the option that says them."""


def own_settings(path: Path | None) -> dict[str, Any]:
    """Read the user's settings; their paths become absolute.

    Raises:
        DeploymentError: the file cannot be read, or what it names is not there.
    """
    if path is None:
        return {}
    data = read_settings(path)
    data.pop("model", None)  # a whole deployment.yaml may serve as the settings of another build
    _resolve_paths(data, path)
    return data


def _resolve_paths(data: dict[str, Any], path: Path) -> None:
    """Make paths absolute: they are relative to the file that has them, and go into another directory."""
    speculation, tensorrt_llm = data.get("speculation"), data.get("tensorrt_llm")
    if isinstance(speculation, dict) and isinstance(draft := speculation.get("draft_model"), str):
        speculation["draft_model"] = _present(path, draft)
    if isinstance(tensorrt_llm, dict) and isinstance(adapters := tensorrt_llm.get("lora"), dict):
        tensorrt_llm["lora"] = {name: _present(path, str(place)) for name, place in adapters.items()}


def _present(path: Path, place: str) -> str:
    found = (path.parent / place).resolve()
    if not found.is_dir():
        raise DeploymentError(f"{path}: {place} is not a directory beside it")
    return str(found)


def deployment_settings(
    checkpoint: Checkpoint, plan: Plan, engine: str, flow: Flow, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what deployment.yaml will say: the plan's, and over it the user's own.

    Raises:
        DeploymentError: a setting of the user's contradicts what is built.
    """
    settings: dict[str, Any] = {
        "model": MODEL,
        "engine": {"kind": engine} | _dtype(checkpoint, plan, engine, flow),
        "batching": {"max_batch_size": plan.max_batch_size, "max_tokens_per_step": plan.max_tokens_per_step},
        "limits": {"max_sequence_length": plan.max_sequence_length},
        "quality": QualitySettings().model_dump(),
    }
    if engine == "pytorch":
        settings["kv_cache"] = {"tokens": plan.kv_cache_tokens}
    else:
        settings["tensorrt_llm"] = {
            "tensor_parallel_size": plan.tensor_parallel_size,
            "pipeline_parallel_size": plan.pipeline_parallel_size,
            "free_gpu_memory_fraction": plan.free_gpu_memory_fraction,
        }
        if flow == "tensorrt":
            settings["tensorrt_llm"]["engine_dir"] = ENGINE
        elif not _section(own, "tensorrt_llm").get("lora"):  # beside adapters there are no CUDA graphs
            settings["tensorrt_llm"]["cuda_graph_batch_sizes"] = _graph_sizes(plan.max_batch_size)
    _refuse_contradictions(plan, settings, own)
    length, limit = _section(own, "limits").get("max_sequence_length"), checkpoint.config.max_position_embeddings
    if isinstance(length, int) and length > limit:
        raise DeploymentError(f"settings: limits.max_sequence_length is {length}; the model's own limit is {limit}")
    return _merged(settings, own)


def _refuse_contradictions(plan: Plan, settings: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse settings of the user's that say otherwise than what the rest of the build is made for."""
    for (section, key), option in _DECIDED.items():
        if key not in _section(own, section):
            continue
        value, decided = own[section][key], _section(settings, section).get(key)
        if key == "dtype":
            decided = "fp8" if plan.kv_cache == "fp8" else "auto"
        if value not in (decided, "auto"):
            raise DeploymentError(
                f"settings: {section}.{key} is {value!r}; the build is for {decided!r}: say it with {option}"
            )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; nothing where it is none, which the validation will tell."""
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _dtype(checkpoint: Checkpoint, plan: Plan, engine: str, flow: Flow) -> dict[str, str]:
    """Return ``engine.dtype`` where the precision says what to compute in; quantized, it is the checkpoint's own."""
    if flow == "tensorrt":  # the converter has its own option for it
        return {}
    own = checkpoint.config.dtype
    if plan.precision == "fp16" and (engine == "pytorch" or own != "float16"):
        raise DeploymentError(f"precision fp16: the checkpoint is {own}, and {engine} does not convert it; use bf16")
    dtype = _DTYPES.get(plan.precision)
    return {"dtype": dtype} if dtype else {}


def _graph_sizes(largest: int) -> list[int]:
    """Return the decode batches that get a CUDA graph: close together where they are small, up to the largest.

    As TensorRT-LLM chooses them when it pads batches; but its own choice ends at 128.
    """
    sizes = {1, 2, 4, *range(8, 129, 8), *(2**power for power in range(8, 13)), largest}
    return sorted(size for size in sizes if size <= largest)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with the values of ``over`` in their place, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
