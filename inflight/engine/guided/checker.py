"""The checker of guides: another process, which is killed and started anew where a guide makes it hang or crash."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import inflight
from inflight.engine.guided.checking import CheckedGuide
from inflight.engine.guided.vocabulary import TokenTable
from inflight.errors import EngineFailure, InflightError, InvalidRequest
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings

log = logging.getLogger(__name__)

_START_S = 120
"""Seconds after which a process that is not ready has failed."""


class GivenUp(InvalidRequest):
    """A guide whose compilation was given up, or ended its process. At another time it may be compiled."""


class Checker:
    """A process that checks guides, one at a time. One thread uses it; ``close`` may come from any."""

    def __init__(self, table: TokenTable, settings: GuidedDecodingSettings) -> None:
        self._table, self._settings = table, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closing = threading.Lock()
        self._closed = False

    def check(self, guide: Guide) -> CheckedGuide | InflightError:
        """Return what the process says of a guide, or the error of a guide that it does not survive."""
        limit = self._settings.compile_timeout_s
        try:
            connection = self._started()
        except (EOFError, OSError) as error:
            log.exception("the process that checks guides does not start")
            self._stop()
            return EngineFailure("guides cannot be compiled; the server's log says why", error)
        try:
            connection.send(guide)
            if connection.poll(limit):
                answer: CheckedGuide | InflightError = connection.recv()
                return answer
            said = f"guided_decoding_guide takes more than {limit:g} s to compile; it must be simpler"
            failed: InflightError = GivenUp(said)
        except (EOFError, OSError):
            failed = GivenUp("guided_decoding_guide cannot be compiled: it takes too much memory or stack")
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

    def _started(self) -> Connection:
        """Return the connection to the process, which is started unless it runs, and is ready."""
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._stop()
        own, other = Pipe()
        self._connection = own
        with other, self._closing:
            if self._closed:
                raise EOFError
            self._process = _spawn(other)
        own.send((self._table, self._settings.max_grammar_size, self._settings.max_lexer_states))
        if not own.poll(_START_S):
            raise TimeoutError
        own.recv()
        return own

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


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
