"""The tensors of a Hugging Face checkpoint directory: safetensors, in one file or several."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.errors import DeploymentError
from inflight.text.checkpoint import read_json

log = logging.getLogger(__name__)


class Shards:
    """The files of a checkpoint; tensors are read one at a time."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            DeploymentError: a file is missing or is not what it should be; it is named.
        """
        self._names = {file: self._read_names(file) for file in _files(directory)}
        counts = Counter(name for names in self._names.values() for name in names)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise DeploymentError(f"{directory}: tensor {twice[0]} is in more than one file")
        self.names = frozenset(counts)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor by name."""
        for number, (file, names) in enumerate(self._names.items(), 1):
            log.info("loading %s (%d of %d)", file.name, number, len(self._names))
            try:
                with safe_open(file, framework="pt") as shard:
                    for name in names:
                        yield name, shard.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise DeploymentError(f"{file}: cannot be read: {error}") from None

    @staticmethod
    def _read_names(file: Path) -> list[str]:
        try:
            with safe_open(file, framework="pt") as shard:
                return list(shard.keys())
        except (OSError, SafetensorError) as error:
            raise DeploymentError(f"{file}: cannot be read: {error}") from None


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise DeploymentError(f"{index}: weight_map is {places!r}; it must say which file holds which tensor")
        return [directory / name for name in sorted(set(map(str, places.values())))]
    file = directory / "model.safetensors"
    if not file.is_file():
        raise DeploymentError(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    return [file]
