"""The checker of guides: another process, which is killed and started anew where a guide makes it hang or crash."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from inflight.engine.guided.checking import CheckedGuide
from inflight.engine.guided.vocabulary import TokenTable
from inflight.errors import EngineFailure, InflightError, InvalidRequest
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings

log = logging.getLogger(__name__)

_START_S = 120
"""Seconds after which a process that is not ready has failed."""


class TookTooLong(InvalidRequest):
    """A guide whose compilation was given up. On a machine that is less busy it may be compiled."""


class Checker:
    """A process that checks guides, one at a time. One thread uses it; ``close`` may come from any."""

    def __init__(self, table: TokenTable, settings: GuidedDecodingSettings) -> None:
        self._table, self._settings = table, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closing = threading.Lock()
        self._closed = False

    def start(self) -> Connection:
        """Start the process, unless it runs, and wait until it is ready.

        Raises:
            EngineFailure: it does not start.
        """
        if self._connection is not None and self._process is not None and self._process.poll() is None:
            return self._connection
        self._stop()
        own, other = Pipe()
        with self._closing:
            if not self._closed:
                self._process = _spawn(other)
        other.close()
        try:
            own.send((self._table, self._settings.max_grammar_size, self._settings.max_lexer_states))
            if not own.poll(_START_S):
                raise TimeoutError
            own.recv()
        except (EOFError, OSError) as error:
            own.close()
            self._stop()
            raise EngineFailure("the process that checks guides does not start", error) from None
        self._connection = own
        return own

    def check(self, guide: Guide) -> CheckedGuide | InflightError:
        """Return what the process says of a guide, or the error of a guide that it does not survive."""
        limit = self._settings.compile_timeout_s
        try:
            connection = self.start()
            connection.send(guide)
            if connection.poll(limit):
                answer: CheckedGuide | InflightError = connection.recv()
                return answer
            error: InflightError = TookTooLong(
                f"guided_decoding_guide takes more than {limit:g} s to compile; it must be simpler"
            )
        except EngineFailure as failure:
            log.exception("guides cannot be checked")
            return failure
        except (EOFError, OSError):
            error = InvalidRequest("guided_decoding_guide cannot be compiled: it takes too much memory or stack")
        log.warning("a guide of the kind %s, %d bytes, ended its process: %s", guide.kind, len(guide.text), error)
        self._stop()
        return error

    def close(self) -> None:
        """End the process; what it checks fails."""
        with self._closing:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _spawn(connection: Connection) -> subprocess.Popen[bytes]:
    """Start the process. It imports what this one does, and its libraries start no threads."""
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "inflight.engine.guided.check_process", str(connection.fileno())],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        start_new_session=True,  # Ctrl-C is the parent's to handle
    )
