"""The safetensors files of a checkpoint directory."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inflight.engine.weight_files import INDEX, SINGLE, weight_files
from inflight.errors import DeploymentError
from inflight.gguf.files import require_contents

log = logging.getLogger(__name__)

_THREADS = min(8, len(os.sched_getaffinity(0)))
"""Reading a mapped file waits for its pages, one after the other in each thread; eight fill a fast disk's queue."""


class Shards:
    """The files of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            DeploymentError: a file is missing or is not what it should be; it is named.
        """
        self.files = weight_files(directory)
        """All of them."""
        if not self.files:
            raise DeploymentError(f"{directory}: no {SINGLE} and no {INDEX}")
        self._names = {file: self._read_names(file) for file in self.files}
        counts = Counter(name for names in self._names.values() for name in names)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise DeploymentError(f"{directory}: tensor {twice[0]} is in more than one file")
        self.names = frozenset(counts)

    def load(self, names: Collection[str], take: Callable[[str, Tensor], None]) -> None:
        """Call ``take`` with each of the tensors ``names``, in several threads at once.

        A tensor is a view of the mapped file, so that what ``take`` copies is copied once, and read while it is.

        Raises:
            DeploymentError: a file cannot be read; or what ``take`` raises, of the first tensor that it does for.
        """
        log.info("loading %s", ", ".join(file.name for file in self._names))
        wanted = {file: [name for name in held if name in names] for file, held in self._names.items()}
        parts = [(file, held[start::_THREADS]) for file, held in wanted.items() for start in range(_THREADS)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="load") as pool:
            list(pool.map(lambda part: _load(part[0], part[1], take), parts))  # a list raises what a thread has raised

    @staticmethod
    def _read_names(file: Path) -> list[str]:
        try:
            require_contents(file)  # of a file that may not be read, the library says that there is none
            with safe_open(file, framework="pt") as shard:
                return list(shard.keys())
        except (OSError, SafetensorError) as error:
            raise DeploymentError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _load(file: Path, names: list[str], take: Callable[[str, Tensor], None]) -> None:
    try:
        with safe_open(file, framework="pt") as shard:
            for name in names:
                take(name, shard.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise DeploymentError(f"{file}: cannot be read: {error}") from None
