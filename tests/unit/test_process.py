"""A stage's process ends after its server, even one that is caught in a call that keeps Python's lock."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

STAGE = """
import ctypes, time
from inflight.triton import process
process.end_with_server()
time.sleep(3)
print("ready", flush=True)
ctypes.{library}(None).sleep(60)
"""
SERVER = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], 'model', 'no_such_region']).wait()"
)

LOADING_SERVER = """
import subprocess, sys, threading, time
stages = []
def load():
    command = [sys.executable, "-c", sys.argv[1], "model", "no_such_region"]
    stages.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    assert stages[0].stdout.readline() == "ready\\n"
    time.sleep(0.5)
loader = threading.Thread(target=load)
loader.start()
loader.join()
print("loaded", flush=True)
print(stages[0].stdout.readline(), end="")
"""


@pytest.mark.sweep
@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["free", "caught"])  # PyDLL keeps the lock during a call
def test_a_stage_ends_after_its_server(library: str) -> None:
    command = [sys.executable, "-c", SERVER, STAGE.format(library=library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        [stage] = psutil.Process(server.pid).children()
        server.kill()
        _ends(stage, 50)


def test_a_stage_lives_while_its_server_does() -> None:
    command = [sys.executable, "-c", SERVER, STAGE.format(library="CDLL").replace("sleep(60)", "sleep(2)")]
    assert subprocess.run(command, timeout=60, capture_output=True, text=True).stdout == "ready\n"


@pytest.mark.proof(waits=True)
def test_a_stage_that_is_caught_before_its_loader_ends_does_so_after_its_server() -> None:
    stage = STAGE.format(library="PyDLL")
    with subprocess.Popen([sys.executable, "-c", LOADING_SERVER, stage], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"loaded\n"
        [caught] = psutil.Process(server.pid).children()
        server.kill()
        _ends(caught, 50)


def _ends(stage: psutil.Process, timeout_s: float) -> None:
    try:
        assert not psutil.wait_procs([stage], timeout=timeout_s)[1]
    finally:
        if stage.is_running():
            stage.send_signal(signal.SIGKILL)


@pytest.mark.proof
def test_the_end_of_its_loader_does_not_end_a_stage() -> None:
    alarm_is_set = "signal.getitimer(signal.ITIMER_REAL)[0]"
    lives = f"import signal\nwhile {alarm_is_set}: time.sleep(0.02)\nprint('lives')"  # an alarm that stays ends it
    stage = STAGE.format(library="CDLL").replace("sleep(60)", "sleep(2)") + lives
    command = [sys.executable, "-c", LOADING_SERVER, stage]
    assert subprocess.run(command, timeout=60, capture_output=True, text=True).stdout == "loaded\nlives\n"
