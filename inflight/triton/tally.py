"""A count that one stage's process raises and another's reads: eight bytes of shared memory.

The stages of one server are processes with one parent, which is how they find each other's. Nothing else passes
between them outside Triton: a call from stage to stage costs as much as what it would tell of.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_BYTES = 8


class Tally:
    """Written by one process, read by any; eight aligned bytes are read whole."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._count = memoryview(memory).cast("Q")

    @property
    def count(self) -> int:
        """What has been counted so far."""
        return self._count[0]

    def add(self) -> None:
        """Count one more; only ever called in one thread of one process."""
        self._count[0] += 1


def make_tally(name: str) -> Tally:
    """Make the tally of this name anew, at zero, for the stages of this process's server."""
    path = _path(name)
    path.unlink(missing_ok=True)  # of a server that was killed, and had this one's process id
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, _BYTES)
        return Tally(mmap.mmap(descriptor, _BYTES))
    finally:
        os.close(descriptor)


def take_tally(name: str) -> Tally | None:
    """Return the tally that another stage has made, or None if none did.

    Its name goes: the two that share it need it no more, and nothing is left when they end.
    """
    try:
        descriptor = os.open(_path(name), os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return Tally(mmap.mmap(descriptor, _BYTES))
    finally:
        os.close(descriptor)
        remove_tally(name)


def remove_tally(name: str) -> None:
    """Remove the name of a tally that nobody has taken."""
    _path(name).unlink(missing_ok=True)


def _path(name: str) -> Path:
    return SHARED_MEMORY / f"inflight_{os.getppid()}_{name}"
