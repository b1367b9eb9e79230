"""The lock of a place where a model is written: one process at a time, whoever removes the lock's file."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from inflight.hub.staging import locked

PATIENCE_S = 60.0


def test_who_waited_for_a_lock_that_is_gone_makes_a_new_one(tmp_path: Path) -> None:
    """Else a third would make one too, and both would write."""
    target = tmp_path / "model"
    waits, holds, may_end = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with locked(target, waits.set):
            holds.set()
            may_end.wait(PATIENCE_S)

    thread = threading.Thread(target=second)
    with locked(target, lambda: None):
        thread.start()
        assert waits.wait(PATIENCE_S)
        assert not holds.is_set()
    assert holds.wait(PATIENCE_S)
    try:
        with (tmp_path / ".model.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            else:
                raise AssertionError("a third process could take the lock")
    finally:
        may_end.set()
        thread.join()
    assert not list(tmp_path.iterdir())
