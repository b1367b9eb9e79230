"""The handle of a process that checks guides. It is killed and started anew where a guide makes it hang or crash."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import inflight
from inflight.engine.guided.guide_check import CheckedGuide
from inflight.engine.guided.vocabulary import TokenTable
from inflight.errors import EngineFailure, InflightError, InvalidRequest, QueueFull
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings

log = logging.getLogger(__name__)

_START_S = 120
"""Seconds after which a process that is not ready has failed."""
_CLOCK_FACTOR, _CLOCK_MORE_S = 5, 10
"""So many seconds may pass by the clock for one of CPU time, and so many more: the machine may have much else to do."""


class GivenUp(InvalidRequest):
    """A guide whose check took more than it may, or ended its process. At another time it may be compiled."""


class CheckProcess:
    """A process that checks guides, one at a time. One thread uses it; ``close`` may come from any."""

    def __init__(self, table: TokenTable, settings: GuidedDecodingSettings) -> None:
        self._table, self._settings = table, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closing = threading.Lock()
        self._closed = False

    def check(self, guide: Guide) -> CheckedGuide | InflightError:
        """Return what the process says of a guide, or the error of a guide that it does not survive."""
        try:
            process, connection = self._started()
        except (EOFError, OSError) as error:
            log.exception("the process that checks guides does not start")
            self._stop()
            return EngineFailure("guides cannot be compiled; the server's log says why", error)
        limit = self._settings.compile_timeout_s
        try:
            with _killed_after(process, limit * _CLOCK_FACTOR + _CLOCK_MORE_S):
                connection.send(guide)
                answer: CheckedGuide | InflightError = connection.recv()
            return answer
        except TimeoutError:
            failed: InflightError = QueueFull("guides take too long to compile at the moment; try again later")
        except (EOFError, OSError):
            if process.wait() == -signal.SIGPROF:
                said = f"takes more than {limit:g} s of CPU time to compile; it must be simpler"
            else:
                said = "cannot be compiled: it takes too much memory or stack"
            failed = GivenUp(f"guided_decoding_guide {said}")
        log.warning("the process that checks guides is ended (%s, %d bytes): %s", guide.kind, len(guide.text), failed)
        self._stop()
        return failed

    def close(self) -> None:
        """End the process; what it checks fails."""
        with self._closing:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _started(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """Return the process, which is started unless it runs, and is ready, and the connection to it."""
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._process, self._connection
        self._stop()
        own, other = Pipe()
        self._connection = own
        with other, self._closing:
            if self._closed:
                raise EOFError
            self._process = process = _spawn(other)
        limits = self._settings
        with _killed_after(process, _START_S):
            own.send((self._table, limits.compile_timeout_s, limits.max_grammar_size, limits.max_lexer_states))
            own.recv()
        return process, own

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@contextmanager
def _killed_after(process: subprocess.Popen[bytes], seconds: float) -> Iterator[None]:
    """Kill a process that takes longer. Whoever reads from it, or writes to it, then finds the end of the connection.

    Raises:
        TimeoutError: it was killed.
    """
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if is_late.is_set():
            raise TimeoutError(f"the process has not answered in {seconds:g} s")


def _spawn(connection: Connection) -> subprocess.Popen[bytes]:
    """Start the process. It imports what this one does, and its libraries start no threads."""
    paths = os.pathsep.join([str(Path(inflight.__path__[0]).parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "inflight.engine.guided.check_process", str(connection.fileno())],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
