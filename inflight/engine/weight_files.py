"""Which files hold a checkpoint's weights, by their names alone. It does without PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.text.files import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LARGEST_INDEX = 64 << 20
"""Bytes of an index of weights: a model of a thousand experts in a layer has half of that."""
_SHARD = re.compile(r"(?!/)[^\x00\\]{1,500}\.safetensors")


def read_index(directory: Path) -> Mapping[str, str] | None:
    """Return the files' names by those of the tensors; None: the checkpoint in ``directory`` has no index.

    Raises:
        DeploymentError: the index is not what it should be.
    """
    index = directory / INDEX
    if not index.exists():
        return None
    places = read_json(index, largest=_LARGEST_INDEX).get("weight_map")
    if not isinstance(places, dict):
        raise DeploymentError(f"{index}: weight_map is {places!r}; it must say which file holds which tensor")
    for name in sorted(set(map(str, places.values()))):
        if not _SHARD.fullmatch(name) or ".." in name:
            raise DeploymentError(f"{index}: {name!r} is no name of a file of weights beside it")
    return places


def weight_files(directory: Path) -> list[Path]:
    """Return the files that the index names, or the only one; none: neither is there.

    Raises:
        DeploymentError: the index is not what it should be, or both are there, and it names other files.
    """
    places, single = read_index(directory), directory / SINGLE
    if places is None:
        return [single] if single.exists() else []
    names = sorted(set(places.values()))
    if single.exists() and names != [SINGLE]:  # Shards of one copy beside the whole of another: which is meant?
        raise DeploymentError(f"{directory}: it has {SINGLE}, and {INDEX} that names other files")
    return [directory / name for name in names]
