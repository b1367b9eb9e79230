"""A compiled TensorRT engine: what its ``config.json`` says, and whether a deployment says the same.

An engine fixes what it was compiled with. A setting that says otherwise would be without effect, so it is refused; what
a deployment leaves out is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import DeploymentError
from inflight.settings.deployment import Deployment
from inflight.settings.speculation import draft_length, draft_tree

_SIZES = ("max_batch_size", "max_num_tokens", "max_seq_len")


@dataclass(frozen=True)
class CompiledEngine:
    """An engine's directory and configuration."""

    directory: Path
    build: Mapping[str, Any]
    """What ``trtllm-build`` was told, by its names; the sizes are there and are numbers."""
    checkpoint: Mapping[str, Any]
    """The configuration of the TensorRT-LLM checkpoint that it was compiled from."""

    @property
    def max_sequence_length(self) -> int:
        """The most tokens that prompt and output may have together; drafts need room behind them."""
        return self.build["max_seq_len"] - (self.build.get("max_draft_len") or 0)

    @property
    def attends_to_cached_blocks(self) -> bool:
        """Whether part of a prompt can attend to what lies in the paged cache; chunks and prefix reuse need it."""
        return self.build["plugin_config"].get("use_paged_context_fmha") in (True, "enable")


_MARKS = {"eagle": "num_eagle_layers", "medusa": "num_medusa_heads"}
"""Method to a key that only checkpoints with its heads have."""


def read_engine(deployment: Deployment) -> CompiledEngine:
    """Read the engine that a deployment names.

    Raises:
        DeploymentError: ``tensorrt_llm.engine_dir`` is missing, or is not an engine's directory.
    """
    directory = deployment.tensorrt_llm.engine_dir
    if directory is None:
        raise DeploymentError("tensorrt_llm.engine_dir is missing; a compiled engine is to be served")
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        engine = CompiledEngine(directory, config["build_config"], config["pretrained_config"])
        sizes = [engine.build[name] for name in _SIZES]
        parts = (engine.build["plugin_config"], engine.checkpoint["mapping"])
    except OSError as error:
        raise DeploymentError(f"tensorrt_llm.engine_dir: {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DeploymentError(f"tensorrt_llm.engine_dir: {path} is not that of a TensorRT engine") from None
    if not all(isinstance(size, int) for size in sizes) or not all(isinstance(part, dict) for part in parts):
        raise DeploymentError(f"tensorrt_llm.engine_dir: {path} is not that of a TensorRT engine")
    return engine


def agreed_engine(deployment: Deployment) -> CompiledEngine:
    """Read the engine that a deployment names, and require that both say the same.

    Raises:
        DeploymentError: see ``read_engine``; all settings that the engine does not follow, by name; a rank's file is
            missing.
    """
    engine = read_engine(deployment)
    if faults := [*_disagreements(deployment, engine)]:
        raise DeploymentError("; ".join(faults))
    for rank in range(deployment.tensorrt_llm.ranks):
        if not (engine.directory / f"rank{rank}.engine").is_file():
            raise DeploymentError(f"tensorrt_llm.engine_dir: {engine.directory} has no rank{rank}.engine")
    return engine


def _disagreements(deployment: Deployment, engine: CompiledEngine) -> Iterator[str]:
    """Yield what the deployment says and the engine does not do."""
    for name, rank in (("tensor_parallel_size", "tp_size"), ("pipeline_parallel_size", "pp_size")):
        value, compiled = getattr(deployment.tensorrt_llm, name), engine.checkpoint["mapping"].get(rank, 1)
        if value != compiled:
            yield f"tensorrt_llm.{name} is {value}; the engine was compiled for {compiled}"
    build = engine.build
    fp8 = (engine.checkpoint.get("quantization") or {}).get("kv_cache_quant_algo") == "FP8"
    for name, compiled in (
        ("batching.max_batch_size", build["max_batch_size"]),
        ("batching.max_tokens_per_step", build["max_num_tokens"]),
        ("limits.max_sequence_length", build["max_seq_len"]),
        ("kv_cache.block_size", build["plugin_config"].get("tokens_per_block")),
        ("kv_cache.dtype", "fp8" if fp8 else "auto"),
    ):
        section, key = name.split(".")
        part = getattr(deployment, section)
        if key in part.model_fields_set and getattr(part, key) != compiled:
            value = getattr(part, key)
            yield f"{name} is {value}; the engine was compiled with {compiled}: leave it out, or compile another"
    cache = deployment.kv_cache
    if "prefix_reuse" in cache.model_fields_set and cache.prefix_reuse and not engine.attends_to_cached_blocks:
        yield "kv_cache.prefix_reuse is true; the engine was compiled without use_paged_context_fmha"
    yield from _drafts(deployment, engine)


def _drafts(deployment: Deployment, engine: CompiledEngine) -> Iterator[str]:
    """Yield how the drafts differ. An engine that takes drafts from outside is served without ``speculation``."""
    settings = deployment.speculation
    method, compiled = settings.method, next((name for name, key in _MARKS.items() if key in engine.checkpoint), None)
    if method != compiled and (compiled or method in _MARKS):
        yield f"speculation.method is {method or 'null'}; the engine was compiled for {compiled or 'none with heads'}"
        return
    expected: dict[str, int] = {}
    if method == "eagle":
        tree = draft_tree(settings)
        expected = {"num_eagle_layers": tree.depth, "max_non_leaves_per_layer": tree.most_inner_nodes_of_a_layer}
    elif method == "medusa":
        expected = {"num_medusa_heads": settings.medusa_heads}
    if method is not None and draft_length(settings) != engine.build.get("max_draft_len"):
        drafted, limit = draft_length(settings), engine.build.get("max_draft_len")
        yield f"speculation drafts {drafted} tokens; the engine was compiled for {limit}"
    for key, value in expected.items():
        if engine.checkpoint.get(key) != value:
            yield f"speculation needs {key} {value}; the engine was compiled with {engine.checkpoint.get(key)}"
