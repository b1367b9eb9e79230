"""A GGUF model's metadata, read by the names that its architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from inflight.errors import DeploymentError
from inflight.gguf.header import TensorInfo

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""What frequencies are divided by; no weights of the checkpoint, and read with its configuration."""


class Described(Protocol):
    """A model's files, or the first of them, without the tensors' values."""

    @property
    def path(self) -> Path:
        """What the first file is called in errors."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """By key."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name."""


class Metadata:
    """A model's metadata, read by the names that its architecture has."""

    def __init__(self, model: Described) -> None:
        """
        Raises:
            DeploymentError: the file does not say its architecture.
        """
        self.model = model
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str = "") -> str:
        """Return a string. Raises DeploymentError: it is something else."""
        value = self.model.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a string")
        return value

    def find(self, name: str) -> int | float | None:
        """Return a value of the architecture, e.g. of ``rope.freq_base``; None: it is not there.

        A list with one value for each layer is that value, if it is the same for all.

        Raises:
            DeploymentError: it is not the same for all, or no finite number.
        """
        value = self.model.metadata.get(self.key(name))
        if isinstance(value, np.ndarray):
            if len(distinct := np.unique(value)) != 1:
                raise self.wrong(self.key(name), value[:8].tolist(), "the same for all layers")
            value = distinct[0].item()
        if value is not None and (type(value) not in (int, float) or not np.isfinite(value)):
            raise self.wrong(self.key(name), value, "a finite number")
        return value

    def count(self, name: str) -> int:
        """Return a positive integer that must be there. Raises DeploymentError: it is missing, or something else."""
        value = self.find(name)
        if type(value) is not int or value < 1:
            raise self.wrong(self.key(name), value, "a positive integer")
        return value

    def flag(self, name: str) -> bool | None:
        """Return whether something is so; None: the file does not say. Raises DeploymentError: it is no boolean."""
        value = self.model.metadata.get(self.key(name))
        if not isinstance(value, bool | None):
            raise self.wrong(self.key(name), value, "true or false")
        return value

    def key(self, name: str) -> str:
        """Return the whole name of a value of the architecture."""
        return f"{self.architecture}.{name}"

    def wrong(self, key: str, value: object, allowed: str) -> DeploymentError:
        """Return the error of the value of ``key``, which is whole; ``allowed``: what it must be, in words."""
        return DeploymentError(f"{self.model.path}: {key} is {value!r:.200}; it must be {allowed}")
