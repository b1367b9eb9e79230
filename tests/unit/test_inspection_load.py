"""Many who ask ``inspect`` at once: few looks at the engine, an answer for each, and nothing sent in its thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.deployment import resolve
from inflight.engine.snapshot import Snapshot
from inflight.errors import ShuttingDown
from inflight.triton.inspection import PERIOD_S, SNAPSHOT, Inspection
from inflight.triton.responses import Arrays
from tests.unit.test_response_streams import FakeSender

DEMO = Path(__file__).parents[2] / "deployments/demo"
DEPLOYMENT = resolve({"model": str(DEMO / "model")}, DEMO, "test")
SHOT = Snapshot(8, 3, 0, 0, (), None)


class Asker(FakeSender):
    """Remembers which thread answers it."""

    thread = ""

    def send(self, arrays: Arrays, final: bool) -> None:
        self.thread = threading.current_thread().name
        super().send(arrays, final)


class Looks:
    """The engine's side: its looks, each in a thread named as its own."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> Snapshot:
        assert threading.current_thread().name == "engine"
        self.count += 1
        return SHOT

    def between_steps(self, call: Callable[[], object]) -> None:
        threading.Thread(target=call, name="engine").start()


def test_who_asks_at_once_shares_a_look() -> None:
    looks = Looks()
    inspection = Inspection(DEPLOYMENT, looks.take, 2048, looks.between_steps)
    began, askers = time.monotonic(), []
    for _ in range(20):
        askers += [Asker() for _ in range(10)]
        for asker in askers[-10:]:
            inspection.answer({}, asker)
        assert askers[-1].ended.wait(10)
    took = time.monotonic() - began
    assert 0 < looks.count <= took / PERIOD_S + 2
    inspection.close()
    assert {asker.thread for asker in askers} == {"inspection"}
    assert [Snapshot.from_json(a.sent[0][1][SNAPSHOT].item().decode()).steps for a in askers] == [3] * 200


def test_a_look_that_fails_and_one_that_cannot_be_answered() -> None:
    def broken() -> Snapshot:
        raise ValueError("no books")

    looks = Looks()
    inspection = Inspection(DEPLOYMENT, broken, 2048, looks.between_steps)
    failed = Asker()
    inspection.answer({}, failed)
    assert failed.ended.wait(10)
    assert isinstance(failed.error, ValueError)
    inspection.close()
    inspection = Inspection(DEPLOYMENT, looks.take, 2048, looks.between_steps)
    askers = [Asker(broken=True), Asker()]
    for asker in askers:
        inspection.answer({}, asker)
    assert askers[1].ended.wait(10)
    inspection.close()
    with pytest.raises(ShuttingDown):
        inspection.answer({}, Asker())


def test_an_engine_that_has_stopped_is_said() -> None:
    def stopped(call: Callable[[], object]) -> None:
        raise ShuttingDown("the server is stopping")

    inspection = Inspection(DEPLOYMENT, Looks().take, 2048, stopped)
    asker = Asker()
    inspection.answer({}, asker)
    inspection.close()
    assert isinstance(asker.error, ShuttingDown)
