"""Runs a worker for one job: a program in another environment, which may fail in every way that a program can."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import InflightError

_TAIL = 300
"""Characters of a worker's last words."""


class WorkerFailure(InflightError):
    """A worker gave no answer."""


@dataclass(frozen=True)
class Worker:
    """How a worker is started."""

    name: str
    command: Sequence[str]
    """The program and its arguments."""
    environment: Mapping[str, str]
    """Variables beside those of this process."""
    log: Path
    """Where its standard error goes; a new job's replaces the last's."""

    def do(self, job: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Give the worker a job, and return its result.

        Raises:
            WorkerFailure: it did not start, failed, took longer, or answered with something else.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            try:
                process = subprocess.Popen(
                    list(self.command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise WorkerFailure(f"{self.name}: {self.command[0]}: {error.strerror}") from None
            answer = self._wait(process, json.dumps(job).encode(), timeout_s)
        if process.returncode:
            raise WorkerFailure(f"{self.name} ended with code {process.returncode}: {self._last_words()}")
        return self._read(answer)

    def _wait(self, process: subprocess.Popen[bytes], job: bytes, timeout_s: float) -> bytes:
        try:
            return process.communicate(job, timeout_s)[0]
        except subprocess.TimeoutExpired:
            raise WorkerFailure(f"{self.name} gave no answer in {timeout_s:g} s; {self.log} is its log") from None
        finally:  # nothing that it started stays, whatever became of it
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _read(self, answer: bytes) -> dict[str, Any]:
        lines = answer.strip().splitlines()
        try:
            return dict(json.loads(lines[-1])["result"])
        except (IndexError, KeyError, TypeError, ValueError):
            shown = lines[-1][:_TAIL].decode(errors="replace") if lines else ""
            raise WorkerFailure(f"{self.name} answered {shown!r}, which is no result") from None

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"{lines[-1][:_TAIL] if lines else 'it said nothing'} ({self.log})"
