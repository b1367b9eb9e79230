"""The header of a GGUF file that a hub has: what the model is, before it is downloaded."""

from __future__ import annotations

from pathlib import Path

from inflight.errors import DeploymentError
from inflight.gguf.checkpoint import cpu_bytes, require_types
from inflight.gguf.families import family_of
from inflight.gguf.header import FileHeader
from inflight.gguf.metadata import Metadata
from inflight.gguf.tokenizer import require_kind
from inflight.hub.model_manifest import plain
from inflight.hub.remote import Hub, Repository, Unreachable
from inflight.hub.verdict import Verdict

_AT_FIRST, _MOST = 2 << 20, 64 << 20
"""Bytes: a header mostly holds the vocabulary, some megabytes."""


def judge_remote(hub: Hub, repository: Repository, path: str) -> Verdict:
    """Judge a GGUF model, of which ``path`` is the first file, by as much of it as its header has.

    Raises:
        DeploymentError: the file cannot be had.
    """
    beginning = _Beginning(hub, repository, path)
    data = beginning.get(min(_AT_FIRST, beginning.size))
    try:
        header = FileHeader(Path(repository.repo) / path, data, beginning.size, beginning.get)
    except Unreachable:
        raise
    except DeploymentError as error:
        return Verdict(None, str(error))
    return _judge(header, str(Path(path).with_name("tokenizer.json")) in repository.files)


def _judge(header: FileHeader, has_tokenizer: bool) -> Verdict:
    """Judge a GGUF model by the header of its first file. What else may be wrong is found when it is loaded.

    ``has_tokenizer``: whether a ``tokenizer.json`` lies beside the file, in place of the tokenizer that it has.
    """
    name = header.metadata.get("general.architecture")
    architecture = plain(name) if isinstance(name, str) else None
    try:
        architecture = family_of(Metadata(header)).architecture
        require_types(header)
        if not has_tokenizer:
            require_kind(header)
    except DeploymentError as error:
        return Verdict(architecture, str(error))
    in_parts = "split.count" in header.metadata
    return Verdict(architecture, cpu_bytes=None if in_parts else cpu_bytes(header))


class _Beginning:
    """The first bytes of a file, as many as have been asked for."""

    def __init__(self, hub: Hub, repository: Repository, path: str) -> None:
        self._hub, self._repository, self._path, self._data = hub, repository, path, b""
        self.size = repository.files[path].bytes

    def get(self, count: int) -> memoryview:
        """Return at least ``count`` bytes. Raises DeploymentError: they cannot be had, or are too many for a header."""
        if count > _MOST:
            raise DeploymentError(f"{self._repository.repo}/{self._path}: its header has more than {_MOST} bytes")
        held = len(self._data)
        wanted = min(max(count, 2 * held), self.size)
        if wanted > held:
            self._data += self._hub.read_part(self._repository, self._path, held, wanted - held)
        return memoryview(self._data)
