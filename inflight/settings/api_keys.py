"""Reads files of API keys, one per line, with empty lines and lines of comments (``#``) between them; names clients."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from inflight.errors import DeploymentError

LARGEST_FILE = 1 << 20
Stamp = tuple[int, int, int]
"""What changes when a file does: its time, its size, and its inode."""


def read_keys(path: Path, setting: str) -> tuple[Stamp, tuple[str, ...]]:
    """Return the stamp of the file that was read, and its keys, each once; ``setting`` is the one that names the file.

    Raises:
        DeploymentError: it cannot be read, or has no key, or what is none.
    """
    try:
        with path.open("rb") as file:
            stamp, content = _of(os.fstat(file.fileno())), file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise DeploymentError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE:
        raise DeploymentError(f"{setting}: {path} has more than {LARGEST_FILE} bytes")
    try:
        lines = [line.strip() for line in content.decode("ascii").splitlines()]
    except UnicodeDecodeError:
        raise DeploymentError(f"{setting}: {path} is not ASCII, which headers can carry alone") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise DeploymentError(f"{setting}: {path} has no key; one per line is expected")
    if any(" " in key or "\t" in key for key in keys):
        raise DeploymentError(f"{setting}: {path} has a key with a space in it")
    return stamp, tuple(dict.fromkeys(keys))


def hash_of(key: str) -> bytes:
    """Return the hash of a key, which does not give it away."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def client_of(key: str) -> str:
    """Return the name of the client whose key this is, the same wherever it is asked for."""
    return hash_of(key).hex()[:16]


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of a file as it is now. Raises OSError: there is none."""
    return _of(path.stat())


def _of(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino
