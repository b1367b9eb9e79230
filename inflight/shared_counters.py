"""Counters in shared memory, by which the processes of one server see of each other what none of them can ask.

A record is a file of eight-byte counters that one process writes and others read; eight aligned bytes are read whole.
Its name holds the process id of the server, which is the parent of every stage. ``Pulse`` shows ``inflight serve`` that
a stage lives and gets on: a process that is stopped or hangs cannot be asked. ``SharedCounter`` tells one stage what
another has counted: a call from stage to stage would cost as much as what it reports.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BEAT_S = 0.25
"""How often a stage that lives counts one more."""
_BEATS, _BEGUN, _ENDED = range(_PULSE_COUNTERS := 3)
_COUNTER_BYTES = 8
_UNFINISHED = re.compile(r"^(inflight_\d+_)")
_PULSE_NAME = re.compile(r"inflight_\d+_pulse_(\d+)_(.+)")


def _create(path: Path, counters: int) -> memoryview:
    """Create a record of so many counters, all zero, which this process writes.

    It gets its name once it has its length: a reader that came before could not map it. A record of processes that had
    these ids before, and were killed, is replaced.
    """
    unfinished = path.with_name(_UNFINISHED.sub(r"\1new_", path.name))
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, counters * _COUNTER_BYTES)
        memory = memoryview(mmap.mmap(descriptor, counters * _COUNTER_BYTES)).cast("Q")
        unfinished.rename(path)
        return memory
    finally:
        os.close(descriptor)


@dataclass
class SharedCounter:
    """One counter of a stage; any stage of the same server reads it, and one thread of one process adds to it."""

    _path: Path
    _counters: memoryview

    @classmethod
    def create(cls, name: str) -> SharedCounter:
        """Create the counter of this name anew, at zero, for the stages of this process's server."""
        path = _counter_path(name)
        return cls(path, _create(path, 1))

    @classmethod
    def open(cls, name: str) -> SharedCounter | None:
        """Return the counter that another stage has created, or None if none did.

        This removes its name: the two stages that share it need none, and nothing is left when they end.
        """
        path = _counter_path(name)
        try:
            with path.open("r+b") as file:
                counter = cls(path, memoryview(mmap.mmap(file.fileno(), _COUNTER_BYTES)).cast("Q"))
        except FileNotFoundError:
            return None
        counter.remove_name()
        return counter

    @property
    def count(self) -> int:
        """What has been counted so far."""
        return self._counters[0]

    def add(self) -> None:
        """Count one more."""
        self._counters[0] += 1

    def remove_name(self) -> None:
        """Remove the counter's name, if nobody has opened it yet."""
        self._path.unlink(missing_ok=True)


def _counter_path(name: str) -> Path:
    return SHARED_MEMORY / f"inflight_{os.getppid()}_{name}"


class Pulse:
    """One stage's record: how often it has shown that it lives, and the calls that it has begun and ended."""

    def __init__(self, path: Path, counters: memoryview) -> None:
        self._path = path
        self._counters = counters
        self._ending = threading.Event()

    @property
    def beats(self) -> int:
        """Grows while the process can run Python."""
        return self._counters[_BEATS]

    @property
    def call(self) -> int | None:
        """The number of the call that the stage is in; None between two calls."""
        begun, ended = self._counters[_BEGUN], self._counters[_ENDED]
        return begun if begun != ended else None

    @property
    def calls(self) -> int:
        """How many calls the stage has begun."""
        return self._counters[_BEGUN]

    @property
    def closed(self) -> bool:
        """Whether the stage has ended in order."""
        return not self._path.exists()

    def beat(self) -> None:
        """Count one more, again and again, until it is closed."""
        while not self._ending.wait(BEAT_S):
            self._counters[_BEATS] += 1

    def in_call(self) -> AbstractContextManager[None]:
        """Return the context of one call: a step of the engine, or a request; for one thread of the stage."""
        return self

    def __enter__(self) -> None:
        self._counters[_BEGUN] += 1

    def __exit__(self, *_: object) -> None:
        self._counters[_ENDED] = self._counters[_BEGUN]

    def close(self) -> None:
        """Say that the stage ends in order."""
        self._path.unlink(missing_ok=True)
        self._ending.set()


def start_pulse(stage: str) -> Pulse:
    """Create the record of this process, a stage of its parent, and let a thread count from here on."""
    path = SHARED_MEMORY / f"inflight_{os.getppid()}_pulse_{os.getpid()}_{stage}"
    pulse = Pulse(path, _create(path, _PULSE_COUNTERS))
    threading.Thread(target=pulse.beat, name="pulse", daemon=True).start()
    return pulse


def _is_record(path: Path, counters: int) -> bool:
    """Return whether a file is a record of so many counters: anybody on this machine can give files such names.

    Nobody else can replace one of this user's: the folder is sticky.
    """
    found = path.lstat()
    whole = stat.S_ISREG(found.st_mode) and found.st_size == counters * _COUNTER_BYTES
    return whole and found.st_uid == os.geteuid()


def read_pulses(server: int) -> dict[int, tuple[str, Pulse]]:
    """Return the stages of the server with this process id: their process ids, names and pulses."""
    found = {}
    for path in SHARED_MEMORY.glob(f"inflight_{server}_pulse_*"):
        name = _PULSE_NAME.fullmatch(path.name)
        if name is None:
            continue
        with suppress(FileNotFoundError):  # the stage ends in order at this moment
            if not _is_record(path, _PULSE_COUNTERS):
                continue
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), _PULSE_COUNTERS * _COUNTER_BYTES, access=mmap.ACCESS_READ)
            found[int(name[1])] = name[2], Pulse(path, memoryview(memory).cast("Q"))
    return found
