"""KeptProcess: a process beside Triton that is kept running until it is to end, as the gateway and the door are."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.serve.log import keep
from inflight.serve.processes import in_words
from inflight.serve.scratch import temporary_directory

log = logging.getLogger(__name__)

PAUSES_S = (0, 1, 2, 4, 8, 16)
"""The pauses before new starts in a row; the last of them before all that follow."""
WELL_S = 60
"""Serving for so long ends a row."""
_LAST_LINES = 5


class KeptProcess(ABC):
    """A process that a thread of its own keeps running, from ``_begin`` to ``_finish``."""

    def __init__(self, name: str, crash_log: str, look_s: float) -> None:
        """
        Args:
            name: what it is, as in "the gateway".
            crash_log: the name under which the log of one that crashed is kept.
            look_s: seconds between two looks at it.
        """
        self._name, self._crash_log, self._look_s = name, crash_log, look_s
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._thread: threading.Thread | None = None
        self._answered, self._tried, self._stopping = threading.Event(), threading.Event(), threading.Event()
        """Whether it has ever answered; whether it has, or never will; whether it is to end."""
        self._error = ""
        self.restarts = 0
        """New starts so far."""

    @property
    def folder(self) -> Path:
        """Its private folder; it is gone after ``stop``."""
        assert self._scratch is not None, f"the {self._name} was not started"
        return Path(self._scratch.name)

    @property
    @abstractmethod
    def log_path(self) -> Path:
        """Its log; it is gone after ``stop``."""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running process."""
        assert self._process is not None, f"the {self._name} was not started"
        return self._process

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @abstractmethod
    def _spawn(self) -> None:
        """Start the process. Raises DeploymentError or OSError."""

    @abstractmethod
    def _watch(self) -> str | None:
        """Look after the process until it has ended or is to; return what is wrong, if it has to be killed.

        The first time that it answers, ``_has_answered`` is told.
        """

    @abstractmethod
    def _end(self) -> str:
        """End the process in order. Return how it ended."""

    def _make_folder(self) -> None:
        self._scratch = temporary_directory(f"inflight-{self._name}-")

    def _begin(self) -> None:
        """Begin to keep it running."""
        # The kernel's signal at the parent's death comes at the death of the thread that started the process.
        self._thread = threading.Thread(target=self._keep, name=self._name, daemon=True)
        self._thread.start()

    def _has_answered(self) -> None:
        self._answered.set()
        self._tried.set()

    def _wait_answered(self) -> None:
        """Wait until it answers. Raises DeploymentError: it cannot; the message is its own."""
        self._tried.wait()
        if not self._answered.is_set():
            raise DeploymentError(f"the {self._name} {self._error}")

    def _finish(self) -> None:
        """End it, and remove its folder."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._scratch is not None:
            self._scratch.cleanup()
        self._thread = self._scratch = None

    def _goes_on(self) -> bool:
        """Return, a moment later, whether the process runs and is to go on."""
        return self.process.poll() is None and not self._stopping.wait(self._look_s)

    def _keep(self) -> None:
        """Run the process again and again, until it is to stop; once, where it never answers."""
        in_a_row = 0
        try:
            while True:
                began = time.monotonic()
                how = self._run_once()
                if self._stopping.is_set() or not self._answered.is_set():
                    self._error = how
                    return
                in_a_row = 0 if time.monotonic() - began >= WELL_S else in_a_row
                self._pause(how, PAUSES_S[min(in_a_row, len(PAUSES_S) - 1)])
                in_a_row += 1
        finally:
            self._tried.set()

    def _pause(self, how: str, pause_s: int) -> None:
        kept = keep(self.log_path, self._crash_log)
        where = f"; its log is kept in {kept}" if kept else ""
        log.warning("the %s %s; it restarts in %d s%s", self._name, how, pause_s, where)
        self.restarts += 1
        self._stopping.wait(pause_s)

    def _run_once(self) -> str:
        """Start the process and wait until it has ended; return how, in words."""
        try:
            self._spawn()
        except Exception as error:
            if not isinstance(error, DeploymentError | OSError):  # a fault of ours
                log.exception("the %s could not be started", self._name)
            return f"could not be started: {error}"
        try:
            wrong = self._watch()
        except Exception as error:  # else the thread would end, and with it what it keeps running
            log.exception("the %s could not be looked after", self._name)
            wrong = f"could not be looked after ({type(error).__name__}: {error})"
        if wrong is not None and not self._stopping.is_set():
            self.process.kill()
            self.process.wait()
            return f"{wrong}{self._said()}"
        if self._stopping.is_set():
            return self._end()
        code = self.process.returncode
        return f"ended {in_words(code)}{self._said() if code > 0 else ''}"

    def _terminate(self, timeout_s: float) -> str:
        """End the process: SIGTERM, and after so many seconds SIGKILL. Return how it ended."""
        process = self.process
        process.terminate()  # one that has ended is not signalled
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
        process.kill()
        return f"ended {in_words(process.wait())}"

    def _said(self) -> str:
        """Return the last line of its log that says something, if there is one."""
        with suppress(OSError):
            lines = self.log_path.read_text(errors="replace").strip().splitlines()
            if said := next((line for line in reversed(lines[-_LAST_LINES:]) if line.strip()), ""):
                return f": {said.removeprefix(f'inflight.{self._name}: ')}"
        return ""
