"""A stage as a Linux process: how old it is, how it ends with its server, and how it makes the server end.

A stage is a child of its server and must end with it, whether that is killed, crashes or times out. Triton's stub also
looks for its server, but waits for its own threads before it ends, and one of them may wait for an answer of the server
(2.51) and hold Python's lock. The stage's GPU memory and shared memory would then stay allocated. So there are two
guards:

1. A thread looks for the server every ``_POLL_S``. Once the server has gone, it removes the shared memory of the two,
   kills the processes that the stage started, and ends the stage.
2. The kernel ends the process where no Python can run any more. ``prctl(PR_SET_PDEATHSIG)`` has it send a signal when
   the stage's parent thread ends, and the signal's handler is the C library's own ``alarm``. A handler is called with
   the signal's number, so the number is how many seconds the process has left: ``alarm`` then ends it by SIGALRM.

The parent *thread* is at first the one that loads the model, which ends after it has, as the server goes on. So there
are two signals: SIGPWR, number 30, while the model loads, which leaves the first guard 30 seconds to take the alarm
back; then SIGQUIT, number 3.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from inflight.shared_counters import SHARED_MEMORY

log = logging.getLogger(__name__)

_POLL_S = 0.25
_LOADING_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1


def age_s() -> float:
    """Return the seconds since this process began (field 22 of proc_pid_stat(5), in clock ticks after boot)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def server_ender() -> Callable[[], None]:
    """Return a function that asks the server to end, so that it is not ready any more and its supervisor restarts it.

    The server is this process's parent as of now. To end the stage alone does not help: the server and its model stay
    ready without it (measured on 2.51: both endpoints answer 200, and every request fails).
    """
    server = os.getppid()

    def end() -> None:
        if os.getppid() != server:  # this is an orphan, and its new parent is another process
            log.error("the server has ended already")
            return
        log.warning("ending the server")
        os.kill(server, signal.SIGTERM)

    return end


def end_with_server() -> None:
    """Have this process and those that it started end soon after the server, its parent as of now."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="orphan", daemon=True).start()


def _watch(server: int) -> None:
    loading = True
    _set_alarm_at_parents_end(signal.SIGPWR)
    while os.getppid() == server:
        # Once its loader has ended, the server's main thread is this process's parent.
        if loading and os.getpid() in _children(Path(f"/proc/{server}/task/{server}/children")):
            loading = False
            ctypes.CDLL(None).alarm(0)  # the end of the thread that loaded the model has set it
            _set_alarm_at_parents_end(signal.SIGQUIT)
        time.sleep(_LOADING_POLL_S if loading else _POLL_S)
    log.error("the server has gone, and the stage with it")
    for path in (*_regions(), *SHARED_MEMORY.glob(f"inflight_{server}_*")):
        with suppress(OSError):
            path.unlink()
    for process in list(_descendants(os.getpid())):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(1)


def _set_alarm_at_parents_end(number: signal.Signals) -> None:
    """Have the kernel call ``alarm(number)`` in this process when its parent thread ends; no Python runs for it."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(number, ctypes.cast(libc.alarm, ctypes.c_void_p))
    libc.prctl(_PR_SET_PDEATHSIG, number)


def forget_region() -> None:
    """Remove the name of the file in which this stage and its server meet; both have it open, and need no name.

    Triton tells clients the name in some of its errors, and a client that had the server open the file could write what
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
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in _children(file):
            yield child
            yield from _descendants(child)


def _children(file: Path) -> list[int]:
    """Return the child processes of a thread, which has such a ``file``; none where it has ended."""
    try:
        return list(map(int, file.read_text().split()))
    except OSError:
        return []
