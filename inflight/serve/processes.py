"""Reads from Linux what processes do that are not this one's children (proc(5))."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STATE, _GROUP, _USER_TIME, _SYSTEM_TIME, _EXIT_STATUS = 0, 2, 11, 12, 49
"""The positions of fields behind the command's name in proc_pid_stat(5)."""
_ENDED = "ZX"
_STOPPED = "Tt"
_POLL_S = 0.02
_STATUS = re.compile(r"^(State|voluntary_ctxt_switches):\t(\w+)", re.MULTILINE)
"""The fields of proc_pid_status(5) that are read."""


@dataclass(frozen=True)
class ProcessState:
    """One process, at one moment."""

    letter: str
    """R, S, D, T, Z, ..."""
    cpu_s: float
    """Seconds of the processor that all its threads have used."""
    exit_status: int
    """The status of a process that has ended, as waitpid(2) has it; 0 also where the kernel does not tell."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, and its parent has not asked how."""
        return self.letter in _ENDED

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.letter in _STOPPED


def look_at(process: int) -> ProcessState | None:
    """Return the state of a process; None: there is none."""
    fields = _fields(Path(f"/proc/{process}/stat"))
    if fields is None:
        return None
    ticks = int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
    return ProcessState(fields[_STATE], ticks / _TICKS_PER_S, int(fields[_EXIT_STATUS]))


@dataclass(frozen=True)
class ThreadState:
    """One thread, at one moment."""

    letter: str
    """As that of ``ProcessState``."""
    sleeps: int | None
    """How often it has given the processor up by itself; None where the kernel does not tell."""


def look_at_threads(process: int) -> dict[str, ThreadState]:
    """Return the states of a process's threads by their ids."""
    found = {}
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        with suppress(OSError):  # it ended meanwhile
            fields = dict(_STATUS.findall(status.read_text(errors="replace")))
            sleeps = fields.get("voluntary_ctxt_switches")
            found[status.parent.name] = ThreadState(fields["State"], None if sleeps is None else int(sleeps))
    return found


def waits_for_machine(before: Mapping[str, ThreadState], now: Mapping[str, ThreadState]) -> bool:
    """Return whether a process is held up by its machine, from two looks at its threads.

    It is where a thread is in an uninterruptible wait, for a file or for memory that is read back; and where one was
    runnable at both looks and never slept in between: then it had a processor or waited for one, all of the time. A
    thread that wakes for a moment, as those do that wait for Python's lock, may have to wait for a processor too, but
    sleeps each time. Threads of a stopped process are not runnable.
    """
    return any(state.letter == "D" or _wants_processor(before.get(thread), state) for thread, state in now.items())


def _wants_processor(before: ThreadState | None, now: ThreadState) -> bool:
    return before == now and now.letter == "R" and now.sleeps is not None


def in_words(code: int) -> str:
    """Return how a process ended: "with code 1", "on SIGABRT".

    Args:
        code: as ``Popen.returncode`` has it, negative for a signal.
    """
    names = {number.value: number.name for number in signal.Signals}
    return f"on {names.get(-code, f'signal {-code}')}" if code < 0 else f"with code {code}"


def wait_for_group(group: int, timeout_s: float) -> None:
    """Wait until no process of a group runs any more, and what it had is free; those that others must reap aside."""
    deadline = time.monotonic() + timeout_s
    while any(_runs_in(group, stat) for stat in Path("/proc").glob("[0-9]*/stat")) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    with suppress(ChildProcessError):  # where this process is the first of a container, orphans become its children
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def runs_alone(leader: int) -> bool:
    """Return whether no other process of the group that this one leads runs any more."""
    members = (stat for stat in Path("/proc").glob("[0-9]*/stat") if stat.parent.name != str(leader))
    return not any(_runs_in(leader, stat) for stat in members)


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since it was booted."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _runs_in(group: int, stat: Path) -> bool:
    fields = _fields(stat)
    return fields is not None and int(fields[_GROUP]) == group and fields[_STATE] not in _ENDED


def _fields(stat: Path) -> list[str] | None:
    try:
        return stat.read_text().rpartition(")")[2].split()
    except OSError:  # it ended meanwhile
        return None
