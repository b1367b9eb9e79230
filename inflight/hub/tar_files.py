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

_LONGEST_HEADER = 2048
"""Bytes of a header, which may claim any length. Python's tarfile takes a time that grows with its square (3.11)."""
_LONGEST_READ = 1 << 20
MOST_MEMBERS = 5_000
_FOLDERS = {"", ".", "blobs", "blobs/sha256"}
"""The directories that an OCI image layout has; others are made where files need them."""


class _Bounded:
    """A file of which no read takes more than its share of memory and time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell, self.seek = file.tell, file.seek
        self.limit = _LONGEST_HEADER

    def read(self, size: int = -1) -> bytes:
        """Read ``size`` bytes."""
        if not 0 <= size <= self.limit:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


@contextmanager
def opened(archive: Path) -> Iterator[tuple[tarfile.TarFile, dict[str, tarfile.TarInfo]]]:
    """Open a tar that is not compressed; yield it, and its files by name, a leading ``./`` left out.

    Raises:
        DeploymentError: it is no such file, now or in what is read of it later; or there is anything but regular files
            in it, a name twice, or too many of them.
    """
    with archive.open("rb") as file:
        bounded = _Bounded(file)
        try:
            with tarfile.open(fileobj=bounded, mode="r:") as tar:  # type: ignore[call-overload]
                members = _read_members(tar, archive)
                bounded.limit = _LONGEST_READ  # what is read from here on are the files
                yield tar, members
        except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
            raise DeploymentError(f"{archive}: not a sound tar archive without compression: {error}") from None


def _read_members(tar: tarfile.TarFile, archive: Path) -> dict[str, tarfile.TarInfo]:
    members: dict[str, tarfile.TarInfo] = {}
    for number, member in enumerate(iter(tar.next, None)):
        if number >= MOST_MEMBERS:
            raise DeploymentError(f"{archive}: more than {MOST_MEMBERS} files and folders are in it")
        name = member.name.removeprefix("./")
        if member.isdir() and name.rstrip("/") in _FOLDERS:
            continue
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise DeploymentError(f"{archive}: {member.name!r} is {_kind(member)}; only plain files may be in it")
        if name in members:
            raise DeploymentError(f"{archive}: {name!r} is in it twice")
        members[name] = member
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
