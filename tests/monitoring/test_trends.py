"""Alerts that compare with an hour ago, proven by faults: an hour is a minute here.

Times double for an alert; here they get far longer than other tests beside it can make them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from monitoring.generate.rule import HOUR, MINUTE
from tests.monitoring.support.stack import Stack, in_thread, load, stack

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus is not installed"),
]

SCALE = 60
PAUSE_S = 0.5
"""After each round of a load: others need the cores."""
SHARED = "Every one of these prompts begins with the same words, which the cache has, and ends with what is its own: "


def test_a_machine_that_is_throttled_and_then_prompts_that_share_nothing(tmp_path: Path) -> None:
    with stack(tmp_path, SCALE) as running:
        # More at once than the batch takes: each step that comes late makes those wait that are in the queue.
        with _load(running, SHARED + "{}"), _crowd(running), _crowd(running):
            time.sleep(HOUR / SCALE)
            with _throttled(running.stub("tensorrt_llm")):
                running.wait_firing("InflightTtftRising", 5 * MINUTE)
                running.wait_firing("InflightItlRising", 5 * MINUTE)
        with _load(running, "{} is how this one begins, unlike all of those that were before it and come behind it."):
            running.wait_firing("InflightPrefixHitRateDropped", HOUR)


@contextmanager
def _load(running: Stack, prompt: str) -> Iterator[None]:
    """Keep eight short requests running, each with a prompt of its own."""
    numbers = itertools.count(int(time.time()))
    with ExitStack() as loads:
        for _ in range(8):
            loads.enter_context(load(running, 1, 4, lambda: prompt.format(next(numbers)), PAUSE_S))
        yield


def _crowd(running: Stack) -> AbstractContextManager[None]:
    return load(running, 32, 12, pause_s=PAUSE_S)


@contextmanager
def _throttled(pid: int) -> Iterator[None]:
    """Let a process run only a part of the time."""

    def throttle(over: threading.Event) -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.5)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.06)

    with in_thread(throttle):
        yield
