"""model-manifest.json: where a model came from, and the size and SHA-256 of each of its files.

It lies in the model's directory and is written last: a directory without it is not a model that was pulled. The
``manifest.json`` of a deployment is another file, which says what an engine was built from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inflight.errors import DeploymentError
from inflight.gguf.files import is_of_images
from inflight.hub.names import is_hidden, is_model_file, parse_model_name, require_model_file

MODEL_MANIFEST = "model-manifest.json"
LARGEST_MANIFEST = 16 << 20
"""Bytes of a manifest, of a ``config.json`` and of an index of weights, at most."""
_CHUNK = 1 << 20
_PLAIN = r"^[A-Za-z0-9_ .,()+/?-]{1,200}$"
"""What is shown of a model's own words: nothing that a terminal obeys."""

ModelFormat = Literal["safetensors", "gguf"]


class ModelFile(BaseModel):
    """One file of a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ModelManifest(BaseModel):
    """Where a model came from, and its files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    pulled: datetime
    """When it was asked for last; of a directory of one's own, when it was described."""
    repo: str | None = None
    """``org/name``; None: a directory of one's own."""
    commit: str | None = Field(None, pattern="^[0-9a-f]{40}$")
    revisions: tuple[str, ...] = ()
    """The branches, tags and commits that were asked for and were at ``commit`` then."""
    source: str | None = None
    """The hub's address."""
    license: str | None = Field(None, pattern=_PLAIN)
    """The licence's name, as the hub has it; its text is among the files."""
    architecture: str | None = Field(None, pattern=_PLAIN)
    """The class that config.json names."""
    format: ModelFormat
    files: dict[str, ModelFile] = Field(min_length=1)
    """By path relative to the model's directory."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the files that hold weights."""
        return sum(file.bytes for path, file in self.files.items() if is_weights(path))

    @property
    def name(self) -> str:
        """The model's name with its commit, as commands take it; of a nameless one a dash."""
        return f"{self.repo}@{(self.commit or '')[:12]}" if self.repo else "-"

    def weights_path(self, directory: Path) -> Path:
        """Return what is served of ``directory``: itself, or its GGUF file, of a split one the first part."""
        if self.format == "safetensors":
            return directory
        found = [path for path in self.files if path.endswith(".gguf")]
        return directory / min([path for path in found if not is_of_images(path)] or found)


def is_weights(path: str) -> bool:
    """Return whether a file of that name holds weights."""
    return path.endswith((".safetensors", ".gguf"))


def encode_manifest(manifest: ModelManifest) -> bytes:
    """Return the manifest as its file has it."""
    return (manifest.model_dump_json(indent=2, exclude_none=True) + "\n").encode()


def decode_manifest(data: bytes, where: str) -> ModelManifest:
    """Read a manifest whose file is called ``where``; every file name in it may be written.

    Raises:
        DeploymentError: one line that says what is wrong with it.
    """
    try:
        manifest = ModelManifest.model_validate_json(data)
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(map(str, detail["loc"])) or "the file"
        raise DeploymentError(f"{where}: {key}: {detail['msg'][:1].lower()}{detail['msg'][1:]}") from None
    for path in manifest.files:
        require_model_file(path, where)
    if MODEL_MANIFEST in manifest.files:
        raise DeploymentError(f"{where}: it lists itself among the files")
    if not any(path.endswith(f".{manifest.format}") for path in manifest.files):
        raise DeploymentError(f"{where}: it lists no weights in {manifest.format}")
    if manifest.repo is not None and (parse_model_name(manifest.repo).repo != manifest.repo or not manifest.commit):
        raise DeploymentError(f"{where}: repo {manifest.repo!r} must be org/name, with a commit")
    return manifest


def read_manifest(directory: Path) -> ModelManifest:
    """Read the manifest of the model in ``directory``.

    Raises:
        DeploymentError: there is none, or it is wrong.
    """
    path = directory / MODEL_MANIFEST
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_MANIFEST)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
    return decode_manifest(data, str(path))


def write_manifest(manifest: ModelManifest, directory: Path) -> None:
    """Write the manifest of the model in ``directory``: whole, or not at all."""
    partial = directory / f".{MODEL_MANIFEST}.partial"
    try:
        with partial.open("wb") as file:
            file.write(encode_manifest(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, directory / MODEL_MANIFEST)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def require_sizes(manifest: ModelManifest, directory: Path) -> None:
    """Require every file of the manifest, in its size; to hash them all would make a start take minutes.

    Raises:
        DeploymentError: names the first that is missing or has another size.
    """
    for path, file in manifest.files.items():
        try:
            size = (directory / path).stat().st_size
        except OSError:
            raise DeploymentError(f"{directory / path} is missing, and {MODEL_MANIFEST} lists it") from None
        if size != file.bytes:
            raise DeploymentError(f"{directory / path} has {size} bytes, and {MODEL_MANIFEST} says {file.bytes}")


def describe_directory(directory: Path, advance: Callable[[int], None]) -> ModelManifest:
    """Return a manifest of the checkpoint in ``directory``, a model of one's own; every byte is read.

    Raises:
        DeploymentError: it holds no weights, or none that its index names.
    """
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    names = [name for path in found if is_model_file(name := path.relative_to(directory).as_posix())]
    names = [name for name in names if name != MODEL_MANIFEST and not is_hidden(name)]
    for name in names:
        require_model_file(name, str(directory))
    weights = [name for name in names if is_weights(name)]
    if not weights:
        raise DeploymentError(f"{directory}: there are no weights, neither *.safetensors nor *.gguf")
    kind: ModelFormat = "safetensors" if any(name.endswith(".safetensors") for name in weights) else "gguf"
    files = {}
    for name in names:
        path = directory / name
        files[name] = ModelFile(bytes=path.stat().st_size, sha256=hash_file(path, advance))
    config = directory / "config.json"
    data = config.read_bytes() if config.is_file() else None
    return ModelManifest(pulled=now(), format=kind, architecture=architecture_of(data, str(config)), files=files)


def architecture_of(config: bytes | None, where: str) -> str | None:
    """Return the class that the bytes of a config.json name; None: there is no config.json, or it names none.

    Raises:
        DeploymentError: it is not a JSON object.
    """
    if config is None:
        return None
    names = decode_object(config, where).get("architectures")
    return plain(str(names[0])) if isinstance(names, list) and names else None


def plain(text: str) -> str | None:
    """Return words of a model's author as they may be shown; what a terminal might obey becomes a question mark."""
    return re.sub(r"[^A-Za-z0-9_ .,()+/-]", "?", text)[:200] or None


def decode_object(data: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        DeploymentError: the bytes are something else.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DeploymentError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DeploymentError(f"{where}: a JSON object is expected")
    return value


def hash_file(path: Path, advance: Callable[[int], None]) -> str:
    """Return the SHA-256 of a file; ``advance`` is told how many bytes more have been read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)
