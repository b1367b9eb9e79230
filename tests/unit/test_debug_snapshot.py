"""Many who ask ``inspect`` at once: few looks at the engine, an answer for each, and nothing sent in its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.engine.snapshot import Snapshot
from inflight.errors import ShuttingDown
from inflight.settings.deployment import resolve
from inflight.triton.debug_snapshot import PERIOD_S, SNAPSHOT, DebugSnapshots
from inflight.triton.response_writer import Arrays
from tests.unit.support.senders import FakeSender

DEMO = Path(__file__).parents[2] / "deployments/demo"
DEPLOYMENT = resolve({"model": str(DEMO / "model")}, DEMO, "test")
SHOT = Snapshot(8, 3, 0, 0, (), None)


class Asker(FakeSender):
    """Remembers which thread answers it."""

    thread = ""

    def send(self, arrays: Arrays, final: bool) -> None:
        self.thread = threading.current_thread().name
        super().send(arrays, final)


class Engine:
    """An engine and its loop: what it is looked at by, each time a thread named as the loop's own."""

    max_sequence_length = 2048

    def __init__(self, error: Exception | None = None) -> None:
        self.looks, self.error = 0, error

    def snapshot(self) -> Snapshot:
        assert threading.current_thread().name == "engine"
        self.looks += 1
        if self.error is not None:
            raise self.error
        return SHOT

    def between_steps(self, call: Callable[[], object]) -> None:
        threading.Thread(target=call, name="engine").start()


def snapshots(engine: Engine) -> DebugSnapshots:
    return DebugSnapshots(DEPLOYMENT, engine, engine, {"temperature": 0.6})


def test_who_asks_at_once_shares_a_look() -> None:
    engine = Engine()
    shown = snapshots(engine)
    began, askers = time.monotonic(), []
    for _ in range(20):
        askers += [Asker() for _ in range(10)]
        for asker in askers[-10:]:
            shown.answer({}, asker)
        assert askers[-1].ended.wait(30)
    took = time.monotonic() - began
    assert 0 < engine.looks <= took / PERIOD_S + 2
    shown.close()
    assert {asker.thread for asker in askers} == {"snapshots"}
    assert [Snapshot.from_json(a.sent[0][1][SNAPSHOT].item().decode()).steps for a in askers] == [3] * 200


def test_a_look_that_fails_and_one_that_cannot_be_answered() -> None:
    shown = snapshots(Engine(ValueError("no books")))
    failed = Asker()
    shown.answer({}, failed)
    assert failed.ended.wait(30)
    assert isinstance(failed.error, ValueError)
    shown.close()
    shown = snapshots(Engine())
    askers = [Asker(broken=True), Asker()]
    for asker in askers:
        shown.answer({}, asker)
    assert askers[1].ended.wait(30)
    shown.close()
    with pytest.raises(ShuttingDown):
        shown.answer({}, Asker())


def test_an_engine_that_has_stopped_is_said() -> None:
    class Stopped(Engine):
        def between_steps(self, call: Callable[[], object]) -> None:
            raise ShuttingDown("the server is stopping")

    shown = snapshots(Stopped())
    asker = Asker()
    shown.answer({}, asker)
    shown.close()
    assert isinstance(asker.error, ShuttingDown)
