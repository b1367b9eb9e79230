"""The checkpoint that a build begins with: is it whole, how large is it, and what is its fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.engine.models.adapted.known import require_known
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import architecture_name, is_known, read_model_config
from inflight.engine.weight_files import INDEX, SINGLE, weight_files
from inflight.errors import DeploymentError
from inflight.export.model_shape import is_quantized
from inflight.export.stages import Progress, tracked
from inflight.gguf.files import is_gguf
from inflight.manifest import hash_file
from inflight.settings.deployment import model_name
from inflight.text.files import read_json


@dataclass(frozen=True)
class Checkpoint:
    """A Hugging Face checkpoint directory."""

    directory: Path
    config: ModelConfig
    weights: tuple[Path, ...]
    """Its safetensors files; none if only the shape is there, which is enough for a plan."""

    @property
    def name(self) -> str:
        """The directory's name; its parent's where it is just called model."""
        return model_name(self.directory)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(file.stat().st_size for file in self.weights)

    def require_weights(self) -> None:
        """Raise DeploymentError where only the shape is there."""
        if not self.weights:
            raise DeploymentError(f"{self.directory}: no {SINGLE} and no {INDEX}; a dry run needs none")


def inspect(directory: Path) -> Checkpoint:
    """Look at a checkpoint without reading its weights.

    Raises:
        DeploymentError: no checkpoint, an unsupported one, one that is quantized already, or a shard is missing.
    """
    if is_gguf(directory):
        raise DeploymentError(f"{directory} is a GGUF file; build from the original checkpoint, or serve it as it is")
    data = read_json(directory / "config.json")
    if is_quantized(directory):
        raise DeploymentError(f"{directory} is quantized already; build from the original, or serve it as it is")
    _require_own_code(directory, data)
    return Checkpoint(directory, read_model_config(data), tuple(_weights(directory)))


def _require_own_code(directory: Path, data: Mapping[str, Any]) -> None:
    """Refuse what only transformers' code computes: its linears are not known by name, nor what quantizing costs it."""
    if is_known(data):
        return
    require_known(data)
    raise DeploymentError(
        f"{architecture_name(data)}: `inflight build` makes deployments of architectures that Inflight has code of its "
        f"own for; transformers' code computes this one, unquantized: `inflight serve {directory}` serves it as it is"
    )


def _weights(directory: Path) -> list[Path]:
    files = weight_files(directory)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DeploymentError(f"{directory}: {', '.join(missing)} is missing; {INDEX} names {len(files)} files")
    return files


def fingerprint(files: Sequence[Path], known: Path, progress: Progress) -> dict[str, str]:
    """Return each file's SHA-256 by name.

    The file ``known`` keeps what was computed, by path, size and time of change: a large checkpoint is read once.

    Raises:
        DeploymentError: ``known`` cannot be written.
    """
    try:
        memory = dict(json.loads(known.read_text()))
    except (OSError, ValueError, TypeError):  # it saves time, no more
        memory = {}
    found = {}
    for file in tracked(files, "fingerprint", progress):
        status = file.stat()
        key = f"{file.resolve()} {status.st_size} {status.st_mtime_ns}"
        if key not in memory:
            memory[key] = hash_file(file)
        found[file.name] = memory[key]
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        partial = known.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(memory, indent=1))
        partial.replace(known)
    except OSError as error:
        raise DeploymentError(f"{known}: cannot be written: {error.strerror}") from None
    return found
