"""Chooses the directory of a server's temporary files."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from functools import cache

from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_ONE_WORD = re.compile(r"[\w./+@%=:,-]+", re.ASCII)
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


def temporary_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory whose path any shell takes for one word of ASCII, and from which programs can run.

    Triton's Python backend (2.51) starts its stages by a shell command that has paths in it without quotes, and the
    Python in them imports from no directory whose path is not ASCII. The server's binary and the library of its Python
    backend are copied into the directory, and the kernel runs neither from a file system that is mounted noexec. So
    where TMPDIR is such a one, another is taken.

    Raises:
        DeploymentError: none can be made.
    """
    try:
        wanted = tempfile.gettempdir()
    except OSError:  # it tries the usual ones too
        wanted = ""
    reasons = list[str]()
    for parent in dict.fromkeys(place for place in (wanted, *_OTHERS) if _ONE_WORD.fullmatch(place)):
        try:
            if os.statvfs(parent).f_flag & os.ST_NOEXEC:
                reasons.append(f"{parent} is mounted noexec, and the server could not run from it")
                continue
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
            continue
        if reasons:
            _tell(f"temporary files go to {parent}: {'; '.join(reasons)}")
        return made
    raise DeploymentError(
        f"no temporary directory can be made ({'; '.join(reasons)}); set TMPDIR to one that can be used"
    )


@cache
def _tell(warning: str) -> None:
    """Log a warning, once: a server that is started again needs another directory each time."""
    log.warning("%s", warning)
