"""Archives: a model as one tar file, to carry to a machine without a network; and back into a directory, checked.

The tar's first member is the model's manifest, the others are the files that it lists. An OCI image layout in a tar, as
``docker model package`` and the CNCF's ModelPack make them, is read too (``oci``). All headers are looked at before a
byte is written. An archive is somebody's input: links, devices, names that lead elsewhere, names that come twice, and
more bytes than are listed are refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Literal

from rich.console import Console

from inflight.errors import DeploymentError
from inflight.hub import oci
from inflight.hub.model_manifest import (
    LARGEST_MANIFEST,
    MODEL_MANIFEST,
    ModelFile,
    ModelManifest,
    decode_manifest,
    encode_manifest,
    require_sizes,
)
from inflight.hub.names import is_safe_path
from inflight.hub.screen import Transfer, tell
from inflight.hub.selection import variant_of
from inflight.hub.staging import locked, publish, remove_empty, require_disk, require_empty, staging_of
from inflight.hub.store import look_at, place_of
from inflight.hub.tar_files import HashingReader, add_bytes, add_file, opened

ArchiveFormat = Literal["tar", "oci"]
_CHUNK = 1 << 20
_MOST_COPIES = 4
_UNPACKED = ".unpacked"
"""The folder of a staging in which an archive's files are written; no model has hidden files."""


def unpack_archive(archive: Path, to: Path | None, console: Console) -> Path:
    """Unpack a model, and return its directory: ``to``, or its place in the models folder.

    Raises:
        DeploymentError: the archive is not what it should be, or the disk is too small; nothing of it is left then.
    """
    with opened(archive) as (tar, found):
        manifest, members = _contents(tar, found, archive)
        if manifest.nbytes > _MOST_COPIES * archive.stat().st_size:  # a blob of a layout may stand for many files
            raise DeploymentError(f"{archive}: its files would have {manifest.nbytes} bytes, many times its own")
        target = to or _place(manifest, archive)
        with locked(target, lambda: tell(console, f"another process writes {target}; waiting for it")):
            if not _is_there(target, manifest, to is not None):
                if to is not None or not target.is_dir():
                    require_empty(target)
                require_disk(target, manifest.nbytes)
                _write(tar, archive, manifest, members, target, console)
    tell(console, f"unpacked {manifest.name}: {target}")
    return target


def _contents(
    tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], archive: Path
) -> tuple[ModelManifest, Mapping[str, tarfile.TarInfo]]:
    """Return what an archive says that it holds, and where each file of it is."""
    if oci.LAYOUT in members:
        return oci.read_layout(tar, members, archive)
    if MODEL_MANIFEST not in members:
        raise DeploymentError(
            f"{archive}: neither {MODEL_MANIFEST} nor {oci.LAYOUT} is in it; `inflight pack` makes one"
        )
    head = members.pop(MODEL_MANIFEST)
    if head.size > LARGEST_MANIFEST:
        raise DeploymentError(f"{archive}: {MODEL_MANIFEST} has {head.size} bytes, too many")
    data = b"".join(_chunks(tar, head))
    manifest = decode_manifest(data, f"{archive}: {MODEL_MANIFEST}")
    for name, member in members.items():
        if not is_safe_path(name):
            raise DeploymentError(f"{archive}: the name {name!r} leads out of the model's directory")
        if name not in manifest.files:
            raise DeploymentError(f"{archive}: {name!r} is in it, and not in its {MODEL_MANIFEST}")
        if member.size != (size := manifest.files[name].bytes):
            raise DeploymentError(f"{archive}: {name!r} has {member.size} bytes, and {MODEL_MANIFEST} says {size}")
    missing = next((name for name in manifest.files if name not in members), None)
    if missing is not None:
        raise DeploymentError(f"{archive}: {missing!r} is missing, and {MODEL_MANIFEST} lists it")
    return manifest, members


def _place(manifest: ModelManifest, archive: Path) -> Path:
    if manifest.repo is None or manifest.commit is None:
        raise DeploymentError(
            f"{archive} does not say which repository and commit it is of; say where to, with --to DIR"
        )
    return place_of(manifest.repo, manifest.commit, variant_of(manifest))


def _is_there(target: Path, manifest: ModelManifest, named: bool) -> bool:
    """Return whether the same files are there already, each in its size.

    A damaged model in the models folder is taken for none; one that the user has ``named`` is left alone.

    Raises:
        DeploymentError: other files are there; or the user's directory is damaged.
    """
    if not target.exists() or (named and not (target / MODEL_MANIFEST).exists()):
        return False
    found = look_at(target)
    if found.manifest is not None and found.manifest.files != manifest.files:
        way = "name another directory" if named else f"`inflight models rm {found.name}` removes it"
        raise DeploymentError(f"{target} holds {found.manifest.name}, with other files; {way}")
    if found.problem is not None and named:
        raise DeploymentError(found.problem)
    return found.problem is None


def _write(
    tar: tarfile.TarFile,
    archive: Path,
    manifest: ModelManifest,
    members: Mapping[str, tarfile.TarInfo],
    target: Path,
    console: Console,
) -> None:
    staging = staging_of(target)
    unpacked = staging / _UNPACKED  # what an interrupted pull has kept lies beside it, until the archive proves whole
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir(parents=True)
    try:
        with closing(Transfer(console, manifest.nbytes, 0)) as transfer:
            for path, file in manifest.files.items():
                _extract(tar, members[path], unpacked / path, file, f"{archive}: {path}", transfer.advance)
        if target.exists():  # empty, or a damaged model
            shutil.rmtree(target)
        publish(unpacked, target, manifest)
    except BaseException:
        shutil.rmtree(unpacked, ignore_errors=True)
        remove_empty([staging])
        raise
    shutil.rmtree(staging, ignore_errors=True)


def _extract(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    path: Path,
    listed: ModelFile,
    where: str,
    advance: Callable[[int], None],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for chunk in _chunks(tar, member):
            digest.update(chunk)
            file.write(chunk)
            advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != listed.sha256:
        raise DeploymentError(f"{where} has the SHA-256 {digest.hexdigest()}, and the archive lists {listed.sha256}")


def _chunks(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    file: IO[bytes] | None = tar.extractfile(member)
    assert file is not None, "regular files have bytes"
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def require_new(archive: Path) -> None:
    """Require that an archive can be written: a model may be read for minutes before.

    Raises:
        DeploymentError: it exists, or its directory does not.
    """
    if archive.exists() or archive.is_symlink():
        raise DeploymentError(f"{archive} exists; name another file, or remove it")
    if not archive.parent.is_dir():
        raise DeploymentError(f"{archive.parent} is not a directory")


def pack_model(directory: Path, manifest: ModelManifest, archive: Path, kind: ArchiveFormat, console: Console) -> None:
    """Write a model as an archive; each file is checked while it is read.

    Raises:
        DeploymentError: the archive exists, the disk is too small, or a file is not what the manifest says; no archive
            is left then.
    """
    require_sizes(manifest, directory)
    require_new(archive)
    require_disk(archive, manifest.nbytes)
    with closing(Transfer(console, manifest.nbytes, 0)) as transfer, _new_tar(archive) as tar:

        def add(name: str, path: str) -> None:
            listed = manifest.files[path]
            with (directory / path).open("rb") as file:
                reader = HashingReader(file, transfer.advance)
                add_file(tar, name, listed.bytes, reader)
            if reader.sha256 != listed.sha256:
                raise DeploymentError(
                    f"{directory / path} has the SHA-256 {reader.sha256}, and {MODEL_MANIFEST} says {listed.sha256}"
                )

        if kind == "oci":
            oci.write_layout(tar, manifest, add)
        else:
            add_bytes(tar, MODEL_MANIFEST, encode_manifest(manifest))
            for path in manifest.files:
                add(path, path)
    tell(console, f"packed {manifest.name}: {archive}")


@contextmanager
def _new_tar(archive: Path) -> Iterator[tarfile.TarFile]:
    """Write a tar under another name, which becomes ``archive`` when it is whole."""
    partial = archive.with_name(f".{archive.name}.partial")
    try:
        with partial.open("wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                yield tar
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, archive)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
