"""Removes what servers leave that nobody was left to tidy up after: those of a killed `inflight serve` above all.

What a server that lives uses is never touched: see ``scratch`` for how that is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from inflight.serve.processes import look_at
from inflight.serve.scratch import BACKENDS_FOLDERS, NAMES, OWNED, OWNER, PREFIX, places
from inflight.shared_counters import SHARED_MEMORY

log = logging.getLogger(__name__)

_STAGES = re.compile(rf"{SHARED_MEMORY}/inflight_(\d+)_")
_REGIONS = rf"{SHARED_MEMORY}/triton_python_backend_shm_region_inflight_\d+_\d+_"
_NOTED = re.compile(rf"{_STAGES.pattern}|{_REGIONS}|{BACKENDS_FOLDERS}[a-z0-9_]{{8}}")
"""What a server notes of what it makes outside of its own directory; nothing else is removed."""
_GONE_S, _POLL_S = 5.0, 0.05
"""How long a killed server is waited for that has not ended quite: it holds ports, and memory of a GPU."""


def remove(prefixes: Iterable[str]) -> None:
    """Remove files, and empty folders, whose paths begin with one of these."""
    for prefix in map(Path, prefixes):
        for path in prefix.parent.glob(f"{prefix.name}*"):
            with contextlib.suppress(OSError):  # it is gone, or another server uses it
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


def sweep() -> None:
    """Remove what servers of this user left that were killed."""
    for place in places():
        for folder in Path(place).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError, UnicodeDecodeError):  # its owner lives, or it is none of ours
                if NAMES.fullmatch(folder.name):
                    _sweep(folder)


def _sweep(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    with open(os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), encoding="utf-8") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if owner.readline() != OWNED:
            return
        noted = [line for line in owner.read().splitlines() if _NOTED.fullmatch(line)]
        servers = [int(match[1]) for line in noted if (match := _STAGES.fullmatch(line))]
        if all(map(_is_gone, servers)):
            remove(noted)
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed what a killed server has left in %s", folder)


def _is_gone(process: int) -> bool:
    """Return whether a server has ended, or does within a moment; another process may have got its number."""
    deadline = time.monotonic() + _GONE_S
    while (state := look_at(process)) is not None and not state.ended and _is_triton(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_triton(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/comm").read_text().startswith("triton")
    except OSError:  # it has ended meanwhile
        return False
