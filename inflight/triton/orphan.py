"""Ends a stage's process when its server has gone without ending it: killed, crashed, or out of time.

Triton's stub looks for its server too, but waits for its own threads before it ends, and one of them may wait for an
answer of the server (2.51), with Python's lock. What it held, a GPU's memory and shared memory, would stay taken. So a
thread looks for the server and tidies up; and if it cannot, the kernel ends the process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from inflight.triton.tally import SHARED_MEMORY

log = logging.getLogger(__name__)

_POLL_S = 0.25
_LOADING_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


def end_with_server() -> None:
    """Have this process and those that it started end soon after the server, its parent as of now."""
    threading.Thread(target=_wait, args=(os.getppid(),), name="orphan", daemon=True).start()


def _wait(server: int) -> None:
    loading = True
    _have_kernel_end_it(signal.SIGPWR)
    while os.getppid() == server:
        if loading and _belongs_to_main_thread(server):
            loading = False
            ctypes.CDLL(None).alarm(0)  # the end of the thread that loaded the model has set it
            _have_kernel_end_it(signal.SIGQUIT)
        time.sleep(_LOADING_POLL_S if loading else _POLL_S)
    log.error("the server has gone, and the stage with it")
    for path in (*_regions(), *SHARED_MEMORY.glob(f"inflight_{server}_*")):
        with suppress(OSError):
            path.unlink()
    for process in list(_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)


def _belongs_to_main_thread(server: int) -> bool:
    """Return whether this process counts as a child of the server's main thread.

    It begins as one of the thread that loads the model, and is handed on when that thread ends.
    """
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:
        return False
    return str(os.getpid()) in children


def _have_kernel_end_it(told_by: signal.Signals) -> None:
    """Have the kernel end this process some seconds after the thread that it is a child of.

    The kernel sends the signal, whose handler is the C library's ``alarm`` itself: called with the signal's number, it
    sets an alarm in so many seconds, which ends the process. No Python is needed for it, nor its lock.

    Args:
        told_by: SIGPWR, number 30, while a model's loader is the parent: its end sets the alarm too, and Python must
            have the time to take it back. Then SIGQUIT, number 3.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(told_by, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PR_SET_PDEATHSIG, told_by)


def forget_region() -> None:
    """Remove the name of the file in which this stage and its server meet; both have it open, and need no name.

    Triton tells the name to clients in some of its errors, and whoever could have the server open it would write what
    the two tell each other. A file without a name is gone with its last process, too, however that ends.
    """
    (SHARED_MEMORY / _region()).unlink(missing_ok=True)


def _regions() -> Iterator[Path]:
    """Yield the files in which the server and its stages met, where they still have a name: that of a stage that loads.

    `inflight serve` names them by itself and its port, so those of stages that are caught can be told too.
    """
    region = _region()
    yield SHARED_MEMORY / region
    if "inflight_" in region:
        yield from SHARED_MEMORY.glob(f"{region.rpartition('_')[0]}_*")


def _region() -> str:
    """Return the name that the server gave the stub of this stage, after the path of its model."""
    return os.fsdecode(Path("/proc/self/cmdline").read_bytes()).split("\0")[2]


def _descendants(process: int) -> Iterator[int]:
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)
