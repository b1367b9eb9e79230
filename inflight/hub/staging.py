"""Staging: a model is written beside the place where it will be, and moved there when every byte has been checked.

For the place ``DIR`` that is ``.DIR.partial``, which is kept when a pull is interrupted. One process at a time writes
it: the one that holds ``.DIR.lock``. So there is never half a model in ``DIR``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import ModelManifest, require_sizes, write_manifest

PARTIAL = ".partial"


def staging_of(target: Path) -> Path:
    """Return where a model for ``target`` is written."""
    return target.with_name(f".{target.name}{PARTIAL}")


def target_of(directory: Path) -> Path:
    """Return the place of which ``directory`` is the staging; of a place itself, that."""
    if not directory.name.endswith(PARTIAL):
        return directory
    return directory.with_name(directory.name.removeprefix(".").removesuffix(PARTIAL))


@contextmanager
def locked(target: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Be the only process that writes ``target``.

    ``waits`` is called if another one does, before the wait, and may raise what is to happen in its place. Folders that
    are made here, and in which nothing is at the end, are removed.
    """
    path = target.with_name(f".{target.name}.lock")
    made = [folder for folder in path.parents if not folder.exists()]
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # another process has just removed the folder, which was empty
            continue
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
                    remove_empty(made)
                return
        finally:
            os.close(descriptor)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, each of which lies in the next one, up to the first in which something is."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


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
    """Write the manifest and move the model to ``target``; all its files are on the disk by then.

    Raises:
        DeploymentError: one of them is not: someone has removed it meanwhile.
    """
    require_sizes(manifest, staging)
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
