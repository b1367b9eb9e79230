"""Tar files as untrusted input, and as output that is the same for the same model."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from inflight.errors import DeploymentError

_LONGEST_READ = 4 << 20
"""Bytes that are read at once, at most: headers of a tar may claim any length."""
_MOST_MEMBERS = 10_000
_FOLDERS = {"", ".", "blobs", "blobs/sha256"}
"""The directories that an OCI image layout has; others are made where files need them."""


class _Bounded:
    """A file of which no read takes more than its share of memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes."""
        if not 0 <= size <= _LONGEST_READ:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


@contextmanager
def opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a tar that is not compressed.

    Raises:
        DeploymentError: it is no such file, now or in what is read of it later.
    """
    with archive.open("rb") as file:
        try:
            with tarfile.open(fileobj=_Bounded(file), mode="r:") as tar:  # type: ignore[call-overload]
                yield tar
        except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
            raise DeploymentError(f"{archive}: not a sound tar archive without compression: {error}") from None


def read_members(tar: tarfile.TarFile, archive: Path) -> dict[str, tarfile.TarInfo]:
    """Return the files of a tar by name, a leading ``./`` left out.

    Raises:
        DeploymentError: there is anything but regular files, a name twice, or too many of them.
    """
    members: dict[str, tarfile.TarInfo] = {}
    while (member := tar.next()) is not None:
        name = member.name.removeprefix("./")
        if member.isdir() and name.rstrip("/") in _FOLDERS:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise DeploymentError(f"{archive}: {member.name!r} is {_kind(member)}; only plain files may be in it")
        if name in members:
            raise DeploymentError(f"{archive}: {name!r} is in it twice")
        members[name] = member
        if len(members) > _MOST_MEMBERS:
            raise DeploymentError(f"{archive}: more than {_MOST_MEMBERS} files are in it")
    return members


def _kind(member: tarfile.TarInfo) -> str:
    kinds = {"a directory": member.isdir(), "a link": member.issym() or member.islnk(), "a device": member.isdev()}
    return next((kind for kind, holds in kinds.items() if holds), "a file with holes or of a special kind")


class HashingReader:
    """Reads a file and hashes what it reads."""

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what was read."""
        return self._digest.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes."""
        chunk = self._file.read(size)
        self._digest.update(chunk)
        self._advance(len(chunk))
        return chunk


def add_file(tar: tarfile.TarFile, name: str, size: int, file: HashingReader) -> None:
    """Add a member of ``size`` bytes, without owner or time."""
    member = tarfile.TarInfo(name)
    member.size = size
    tar.addfile(member, file)


def add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a small member."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
