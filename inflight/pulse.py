"""A stage's pulse: three counts in shared memory, by which ``inflight serve`` sees that the stage lives and gets on.

The stage's process writes them and the supervisor reads them: a process that is stopped or hangs cannot be asked. The
file's name holds the process ids of the server and the stage; a stage that ends in order removes the file.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BEAT_S = 0.25
"""How often a stage that lives counts one more."""
_BEATS, _BEGUN, _ENDED = range(3)
_BYTES = 3 * 8
_NAME = re.compile(r"inflight_\d+_pulse_(\d+)_(.+)")


class Pulse:
    """One stage's record; eight aligned bytes are read whole."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._counts = memoryview(memory).cast("Q")
        self._ending = threading.Event()
        self._in_call = _InCall(self._counts)

    @property
    def beats(self) -> int:
        """Grows while the process can run Python."""
        return self._counts[_BEATS]

    @property
    def call(self) -> int | None:
        """The number of the call that the stage is in; None between two calls."""
        begun, ended = self._counts[_BEGUN], self._counts[_ENDED]
        return begun if begun != ended else None

    @property
    def closed(self) -> bool:
        """Whether the stage has ended in order."""
        return not self._path.exists()

    def beat(self) -> None:
        """Count one more, again and again, until it is closed."""
        while not self._ending.wait(BEAT_S):
            self._counts[_BEATS] += 1

    def in_call(self) -> AbstractContextManager[None]:
        """Count as in one call: a step of the engine, or a batch of requests; in one thread of the stage only."""
        return self._in_call

    def close(self) -> None:
        """Say that the stage ends in order."""
        self._path.unlink(missing_ok=True)
        self._ending.set()


class _InCall(AbstractContextManager[None]):
    """The context of a call. A class, not a generator: each step of the engine passes through it."""

    def __init__(self, counts: memoryview) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._counts[_BEGUN] += 1

    def __exit__(self, *_: object) -> None:
        self._counts[_ENDED] = self._counts[_BEGUN]


def start_pulse(stage: str) -> Pulse:
    """Make the record of this process, a stage of its parent, and let a thread count from here on."""
    path = SHARED_MEMORY / f"inflight_{os.getppid()}_pulse_{os.getpid()}_{stage}"
    path.unlink(missing_ok=True)  # of processes that had these ids before, and were killed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, _BYTES)
        pulse = Pulse(path, mmap.mmap(descriptor, _BYTES))
    finally:
        os.close(descriptor)
    threading.Thread(target=pulse.beat, name="pulse", daemon=True).start()
    return pulse


def read_pulses(server: int) -> dict[int, tuple[str, Pulse]]:
    """Return the stages of the server with this process id: their process ids, names and pulses."""
    found = {}
    for path in SHARED_MEMORY.glob(f"inflight_{server}_pulse_*"):
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        with suppress(FileNotFoundError):  # the stage ends in order at this moment
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), _BYTES, access=mmap.ACCESS_READ)
            found[int(name[1])] = name[2], Pulse(path, memory)
    return found
