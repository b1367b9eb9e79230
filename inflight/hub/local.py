"""What is here already: a directory gets a manifest or is held against its own, an archive is unpacked."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub.archive import unpack_archive
from inflight.hub.model_manifest import (
    MODEL_MANIFEST,
    ModelManifest,
    describe_directory,
    hash_file,
    read_manifest,
    require_sizes,
    write_manifest,
)
from inflight.hub.names import parse_typed_name
from inflight.hub.screen import Transfer, tell
from inflight.hub.store import find_model, models_folder


def pull_path(path: Path, to: Path | None, console: Console) -> Path:
    """Check a directory, or unpack an archive; return the model's directory.

    Raises:
        DeploymentError: it holds no model, or not the one that its manifest describes.
    """
    if not path.is_dir():
        return unpack_archive(path, to, console)
    if to is not None:
        raise DeploymentError(f"--to: {path} is a directory already; copy it")
    if (path / MODEL_MANIFEST).exists():
        manifest = read_manifest(path)
        check_directory(path, manifest, console)
        tell(console, f"{path}: {len(manifest.files)} files are as {MODEL_MANIFEST} says")
    else:
        manifest = _described(path, console)
        write_manifest(manifest, path)
        tell(console, f"{path / MODEL_MANIFEST}: written, of {len(manifest.files)} files")
    return path


def check_directory(directory: Path, manifest: ModelManifest, console: Console) -> None:
    """Require every byte that the manifest describes.

    Raises:
        DeploymentError: names the first file that is missing or another.
    """
    require_sizes(manifest, directory)
    with closing(Transfer(console, manifest.nbytes, manifest.nbytes)) as transfer:
        for path, file in manifest.files.items():
            found = hash_file(directory / path, transfer.advance)
            if found != file.sha256:
                raise DeploymentError(
                    f"{directory / path} has the SHA-256 {found}, and {MODEL_MANIFEST} says {file.sha256}"
                )


def find_to_pack(text: str, console: Console) -> tuple[Path, ModelManifest]:
    """Return the directory and the manifest of what a user wants packed: a directory, or a name of what is here.

    Raises:
        DeploymentError: there is no such model.
    """
    path = Path(text)
    if path.is_dir():
        return path, read_manifest(path) if (path / MODEL_MANIFEST).exists() else _described(path, console)
    found = find_model(parse_typed_name(text))
    if found is None or found.manifest is None:
        raise DeploymentError(f"there is no directory {text}, and no model of that name in {models_folder()}")
    return found.directory, found.manifest


def _described(directory: Path, console: Console) -> ModelManifest:
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    with closing(Transfer(console, size, size)) as transfer:
        return describe_directory(directory, transfer.advance)
