"""The end of a server's process group, and of a stage whose server has gone, with processes in Triton's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from inflight.serve import shutdown
from inflight.serve.shutdown import end_server

NOWHERE = "127.0.0.1", 1
STAGE = """
import subprocess, sys, time
from inflight.triton.process import end_with_server
end_with_server()
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
time.sleep(60)
"""
SERVER = """
import os, subprocess, sys, time
stage = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
print(stage.pid, stage.stdout.readline(), end="", flush=True)
time.sleep(60)
"""
KEEPS_A_REQUEST = """
import signal, subprocess, time
stage = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, lambda *_: stage.terminate() or stage.wait())
print(stage.pid, flush=True)
while True:
    time.sleep(0.1)
"""
"""It ends its stage when it is asked to end, and then does not end itself."""


def _start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)


def _first_line(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    assert process.stdout is not None
    return [psutil.Process(int(word)) for word in process.stdout.readline().split()]


def test_what_a_server_leaves_of_its_group_is_ended() -> None:
    server = _start("bash", "-c", "trap 'exit 3' TERM; sleep 60 & echo $!; while true; do sleep 0.1; done")
    left = _first_line(server)
    assert end_server(server, NOWHERE, None, 20) == 3
    assert not psutil.wait_procs(left, timeout=30)[1]
    assert end_server(server, NOWHERE, None, 20) == 3, "one that has ended already"


def test_a_server_that_does_not_end_is_killed() -> None:
    server = _start("bash", "-c", "trap '' TERM; echo $$; while true; do sleep 0.1; done")
    _first_line(server)
    assert end_server(server, NOWHERE, None, 0.3) == -signal.SIGKILL


def test_a_server_whose_stages_have_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, so nobody is warned."""
    monkeypatch.setattr(shutdown, "LOOK_S", 0.1)
    caplog.set_level("DEBUG", "inflight.serve.shutdown")
    server = _start(sys.executable, "-c", KEEPS_A_REQUEST)
    _first_line(server)
    assert end_server(server, NOWHERE, None, 60) == -signal.SIGKILL
    [said] = [record for record in caplog.records if "the server's stages have ended" in record.getMessage()]
    assert said.levelname == "DEBUG"


@pytest.mark.parametrize(("active", "killed"), [("0", True), ("1", False), (None, False)])
def test_a_server_without_requests_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, active: str | None, killed: bool
) -> None:
    """It ends by itself after some time, as Triton does when its exit timeout is over."""
    page = f'nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="active",version="1"}} {active}'
    monkeypatch.setattr(shutdown, "read_directly", lambda url: (page if active else "").encode())
    monkeypatch.setattr(shutdown, "LOOK_S", 0.1)
    seconds = 60 if killed else 2
    server = _start("bash", "-c", f"trap 'sleep {seconds}; exit 1' TERM; echo $$; while true; do sleep 0.1; done")
    _first_line(server)
    assert end_server(server, NOWHERE, "http://127.0.0.1:1/metrics", 90) == (-signal.SIGKILL if killed else 1)


@pytest.mark.parametrize("fault", ["works", "the server works", "ends", "calls", "in a call", "starves"])
def test_a_stage_that_may_have_work_is_waited_for(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A long prompt in the tokenizer, or a body that is parsed, is no request of the engine yet; a stage may end."""
    counts = SimpleNamespace(beats=0, calls=4, call=None, closed=False)
    stage, cpu_s = os.getpid() + 1, {os.getpid(): 0.0, os.getpid() + 1: 0.0}
    monkeypatch.setattr(shutdown, "read_pulses", lambda server: {stage: ("tokenizer", counts)})
    monkeypatch.setattr(shutdown, "look_at", lambda process: SimpleNamespace(cpu_s=cpu_s[process]))
    monkeypatch.setattr(shutdown, "_has_no_request", lambda metrics: True)
    work = shutdown._Work(os.getpid(), "http://127.0.0.1:1/metrics")

    def look() -> int:
        counts.beats += 1
        work.look()
        return work.idle_looks

    assert [look(), look()] == [1, 2]
    match fault:
        case "works":
            cpu_s[stage] += 1000
        case "the server works":
            cpu_s[os.getpid()] += 1000
        case "ends":
            counts.closed = True
        case "calls":
            counts.calls += 1
        case "in a call":
            counts.call = 4
        case "starves":
            counts.beats -= 1
    assert look() == 0


def test_a_machine_that_stands_still_does_not_count_against_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no stage any more and is about to end, when the clock goes on by a minute between two looks."""
    looks: list[int] = []
    monkeypatch.setattr(shutdown, "LOOKS", 15)
    monkeypatch.setattr(shutdown, "runs_alone", lambda _: looks.append(1) or len(looks) > 1)
    monkeypatch.setattr(shutdown, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * (len(looks) > 1)))
    server = _start("bash", "-c", "trap 'sleep 1.5; exit 0' TERM; echo $$; while true; do sleep 0.1; done")
    _first_line(server)
    assert end_server(server, NOWHERE, None, 600) == 0
    assert len(looks) > 1, "it was looked at only when it was asked to end"


def test_a_stage_ends_with_its_server_and_all_it_started_with_it(tmp_path: Path) -> None:
    script, region = tmp_path / "stub.py", Path("/dev/shm") / f"inflight_test_{uuid.uuid4()}"
    script.write_text(STAGE)
    server = _start(sys.executable, "-c", SERVER, sys.executable, str(script), region.name)
    stage, started = _first_line(server)
    tally = Path("/dev/shm") / f"inflight_{server.pid}_tally"
    region.touch()
    tally.touch()
    server.kill()
    server.wait()
    assert not psutil.wait_procs([stage, started], timeout=60)[1]
    assert not region.exists()
    assert not tally.exists()
