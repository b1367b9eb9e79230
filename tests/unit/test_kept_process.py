"""A kept process starts again after a crash, and outlives a fault of the thread that looks after it."""

from __future__ import annotations

import logging
import subprocess
import threading
from pathlib import Path

import pytest

from inflight.serve import kept_process
from inflight.serve.kept_process import KeptProcess


class _Sleeper(KeptProcess):
    """Keeps a process that only sleeps; the first look after it fails once it has answered."""

    def __init__(self, error: Exception) -> None:
        super().__init__("sleeper", "crash-sleeper.log", 0.01)
        self._fault: Exception | None = error
        self.pids: list[int] = []
        self.serves_again = threading.Event()

    @property
    def log_path(self) -> Path:
        return self.folder / "sleeper.log"

    def start(self) -> None:
        self._make_folder()
        self._begin()
        self._wait_answered()

    def stop(self) -> None:
        self._finish()

    def _spawn(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"])
        self.pids.append(self._process.pid)

    def _watch(self) -> str | None:
        self._has_answered()
        if self._fault is not None:
            error, self._fault = self._fault, None
            raise error
        self.serves_again.set()
        while self._goes_on():
            pass
        return None

    def _end(self) -> str:
        return self._terminate(5)


@pytest.mark.parametrize(
    ("well_s", "expected"),
    [(60, [0, 1, 2, 4, 8, 16, 16, 16]), (0, [0] * 8)],
    ids=["crashes in a row", "had served well"],
)
def test_the_pause_before_a_start_grows_with_crashes_in_a_row(
    monkeypatch: pytest.MonkeyPatch, well_s: int, expected: list[int]
) -> None:
    """A process that has served for ``WELL_S`` ends the row. These crash once they have answered."""
    pauses = list[int]()
    enough = threading.Event()

    class Crasher(_Sleeper):
        def _watch(self) -> str | None:
            self._has_answered()
            return "crashed"

        def _pause(self, how: str, pause_s: int) -> None:
            pauses.append(pause_s)
            if len(pauses) == 8:
                self._stopping.set()
                enough.set()

    monkeypatch.setattr(kept_process, "WELL_S", well_s)
    crasher = Crasher(OSError())
    try:
        crasher.start()
        assert enough.wait(60)
    finally:
        crasher.stop()
    assert pauses == expected


def test_a_fault_while_it_is_looked_after_restarts_it(caplog: pytest.LogCaptureFixture) -> None:
    """Linux ends the process with the thread that started it, so the thread must not end."""
    sleeper = _Sleeper(OSError(28, "No space left on device"))
    try:
        with caplog.at_level(logging.WARNING):
            sleeper.start()
            assert sleeper.serves_again.wait(60)
        assert sleeper.runs
        assert sleeper.restarts == 1
        first, second = sleeper.pids
        assert first != second
        assert not Path(f"/proc/{first}").exists()
        assert "could not be looked after (OSError: [Errno 28] No space left on device); it restarts" in caplog.text
    finally:
        sleeper.stop()
    assert not sleeper.runs
