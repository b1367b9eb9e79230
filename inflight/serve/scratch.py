"""Where a server's temporary files go."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

from inflight.errors import DeploymentError

_ONE_WORD = re.compile(r"[\w./+@%=:,-]+", re.ASCII)
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


def temporary_directory(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory whose path any shell takes for one word of ASCII.

    Triton's Python backend (2.51) starts its stages by a shell command that has paths in it without quotes, and the
    Python in them imports from no directory whose path is not ASCII. So where TMPDIR is such a one, another is taken.

    Raises:
        DeploymentError: none can be made.
    """
    reasons = []
    for parent in _parents():
        try:
            return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
    raise DeploymentError(f"no temporary directory can be made ({'; '.join(reasons)}); TMPDIR names where to")


def _parents() -> Iterator[str]:
    try:
        wanted = tempfile.gettempdir()
    except OSError:  # it tries the usual ones too
        wanted = ""
    yield from dict.fromkeys(one for one in (wanted, *_OTHERS) if _ONE_WORD.fullmatch(one))
