"""Staging: a model is written beside the place where it will be, and moved there when every byte has been checked.

For the place ``DIR`` that is ``.DIR.partial``, which is kept when a pull is interrupted. One process at a time writes
it: the one that holds ``.DIR.lock``. So there is never half a model in ``DIR``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import ModelManifest, write_manifest

PARTIAL = ".partial"


def staging_of(target: Path) -> Path:
    """Return where a model for ``target`` is written."""
    return target.with_name(f".{target.name}{PARTIAL}")


@contextmanager
def locked(target: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Be the only process that writes ``target``; ``waits`` is called once if another one does, before the wait."""
    path = target.with_name(f".{target.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):  # whoever held it may have removed it: then another process made a new one
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def require_empty(target: Path) -> None:
    """Require that nothing is lost when ``target`` becomes a model.

    Raises:
        DeploymentError: it is a file, or a directory that holds something.
    """
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise DeploymentError(f"{target} exists and is not a directory")
    if target.is_dir() and any(target.iterdir()):
        raise DeploymentError(f"{target} is not empty; name a directory that is, or one that does not exist")


def require_disk(target: Path, needed: int) -> None:
    """Require ``needed`` free bytes on the disk that will hold ``target``.

    Raises:
        DeploymentError: it has fewer.
    """
    free = free_disk(target)
    if free < needed:
        raise DeploymentError(
            f"the disk of {target} has {in_units(free)} free, and {in_units(needed)} are needed: "
            f"{in_units(needed - free)} more"
        )


def free_disk(target: Path) -> int:
    """Return the free bytes of the disk that holds ``target``, or will."""
    place = target.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def sweep(staging: Path, wanted: Callable[[str], bool]) -> None:
    """Remove from ``staging`` whatever is not a regular file that is ``wanted``, by its relative path."""
    for path in sorted(staging.rglob("*"), reverse=True):
        if path.is_symlink() or not path.is_dir():
            if path.is_symlink() or not path.is_file() or not wanted(path.relative_to(staging).as_posix()):
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def publish(staging: Path, target: Path, manifest: ModelManifest) -> None:
    """Write the manifest and move the model to ``target``; all its files are on the disk by then."""
    write_manifest(manifest, staging)
    os.replace(staging, target)
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def in_units(count: float) -> str:
    """Return a number of bytes with a decimal unit, such as ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
