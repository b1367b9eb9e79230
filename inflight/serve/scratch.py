"""Chooses the directory of a server's temporary files, and tells whose process has ended that made one.

A process that is killed leaves its directory. So each has a file ``owner`` that its process holds locked, which the
kernel lets go of however the process ends; and the file names what else the process has made and would have removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import TextIO

from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

PREFIX = "inflight-"
"""What the name of each directory begins with."""
NAMES = re.compile(rf"{PREFIX}([a-z]+-)?[a-z0-9_]{{8}}")
"""The names that directories are made by."""
BACKENDS_FOLDERS = "/tmp/if-"
"""The folders of a server's Python backend: their paths go on with the last letters of its directory's name."""
OWNER, OWNED = "owner", "inflight made this directory, and removes it once its process has ended.\n"
"""The file that makes a directory one of these, and its first line."""
_ONE_WORD = re.compile(r"[\w./+@%=:,-]+", re.ASCII)
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


class OwnedDirectory(tempfile.TemporaryDirectory[str]):
    """A temporary directory that others know to be in use as long as its process lives."""

    def __init__(self, prefix: str, parent: str) -> None:
        super().__init__(prefix=prefix, dir=parent)
        self._owner = _locked(Path(self.name))
        # What tidies up /tmp, as systemd-tmpfiles does after ten days, leaves a directory alone that is locked.
        self._itself = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._itself, fcntl.LOCK_SH)

    @property
    def backends_folders(self) -> str:
        """The paths of the folders of its server's Python backend begin with this; they are always in /tmp."""
        return BACKENDS_FOLDERS + self.name[-8:]

    def note(self, path: str) -> None:
        """Note files that are to be removed with the directory: all whose paths begin with ``path``."""
        self._owner.write(f"{path}\n")
        self._owner.flush()

    def cleanup(self) -> None:
        """Remove the directory."""
        super().cleanup()
        self._owner.close()
        os.close(self._itself)


def _locked(directory: Path) -> TextIO:
    """Return the file ``owner``, made in a directory. It has its name once it is locked: nobody sees it before."""
    unfinished = directory / f"{OWNER}.new"
    file = unfinished.open("w")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.write(OWNED)
    file.flush()
    unfinished.rename(directory / OWNER)
    return file


def temporary_directory(prefix: str) -> OwnedDirectory:
    """Make a temporary directory whose path any shell takes for one word of ASCII, and from which programs can run.

    Triton's Python backend (2.51) starts its stages by a shell command that has paths in it without quotes, and the
    Python in them imports from no directory whose path is not ASCII. The server's binary and the library of its Python
    backend are copied into the directory, and the kernel runs neither from a file system that is mounted noexec. So
    where TMPDIR is such a one, another is taken.

    Raises:
        DeploymentError: none can be made.
    """
    reasons = list[str]()
    for parent in places():
        try:
            if os.statvfs(parent).f_flag & os.ST_NOEXEC:
                reasons.append(f"{parent} is mounted noexec, and the server could not run from it")
                continue
            made = OwnedDirectory(prefix, parent)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if reasons:
            _tell(f"temporary files go to {parent}: {'; '.join(reasons)}")
        return made
    raise DeploymentError(
        f"no temporary directory can be made ({'; '.join(reasons)}); set TMPDIR to one that can be used"
    )


def places() -> list[str]:
    """Return where temporary directories are made, in the order in which they are tried."""
    try:
        wanted = tempfile.gettempdir()
    except OSError:  # it tries the usual ones too
        wanted = ""
    return list(dict.fromkeys(place for place in (wanted, *_OTHERS) if _ONE_WORD.fullmatch(place)))


@cache
def _tell(warning: str) -> None:
    """Log a warning, once: a server that is started again needs another directory each time."""
    log.warning("%s", warning)
