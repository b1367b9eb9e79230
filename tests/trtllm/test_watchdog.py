"""The watchdog alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from inflight.trtllm import watchdog as module
from inflight.trtllm.watchdog import Watchdog


class Kennel:
    """A watchdog with a limit of 10 s, 70 s at the start, its clock, and how often it called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.now = 0.0
        self.calls = 0
        self.called = threading.Event()
        self.watchdog = Watchdog(10, 70, self._call)

    def bites_at(self, now: float) -> bool:
        self.now = now
        return self.watchdog.check()

    def _call(self) -> None:
        self.calls += 1
        self.called.set()


@pytest.fixture
def kennel(monkeypatch: pytest.MonkeyPatch) -> Kennel:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    return Kennel(monkeypatch)


def test_watchdog_bites_without_progress_and_calls_once(kennel: Kennel) -> None:
    kennel.watchdog.arm()
    assert not kennel.bites_at(10)
    kennel.watchdog.progress()
    assert not kennel.bites_at(20)
    assert kennel.bites_at(20.5)
    assert kennel.watchdog.message == "TensorRT-LLM has made no progress for 10 s; the server must be started again"
    kennel.watchdog.progress()
    assert kennel.bites_at(21), "a dead engine stays dead"
    kennel.watchdog.declare_dead("something else")
    assert kennel.called.wait(30)
    assert not threading.Event().wait(0.2)
    assert kennel.calls == 1
    assert "no progress" in kennel.watchdog.message, "the first reason is the reason"


def test_watchdog_before_arm_is_patient_and_calls_nobody(kennel: Kennel) -> None:
    assert not kennel.bites_at(70)
    assert kennel.bites_at(71)
    assert "no progress for 70 s, server.start_timeout_s;" in kennel.watchdog.message
    assert not kennel.called.wait(0.2)


@pytest.mark.parametrize("act", [Watchdog.arm, Watchdog.progress])
def test_watchdog_waits_anew_after_progress(kennel: Kennel, act: Callable[[Watchdog], None]) -> None:
    kennel.watchdog.arm()
    kennel.now = 9
    act(kennel.watchdog)
    assert not kennel.bites_at(19)


def test_watchdog_condemn_is_dead_at_once(kennel: Kennel) -> None:
    kennel.watchdog.arm()
    kennel.watchdog.declare_dead("TensorRT-LLM has failed")
    assert kennel.watchdog.dead
    assert kennel.watchdog.check()
    assert kennel.called.wait(30)
