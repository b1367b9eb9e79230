"""When a process stands still, by what is seen of it; and what Linux tells of one that has ended."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from inflight.serve import vitals as vitals_module
from inflight.serve.processes import (
    ThreadState,
    in_words,
    look_at,
    look_at_threads,
    wait_for_group,
    waits_for_machine,
)
from inflight.serve.vitals import LIFELESS_S, LOOK_S, PATIENCE_WITH_WORK, End, Standstill, Vitals
from inflight.shared_counters import SHARED_MEMORY, read_pulses, start_pulse

HANG_S = 20.0


def _look(
    seconds: float, *, beats: bool = False, call: Callable[[int], int | None] = lambda _: None, busy: bool = False
) -> str | None:
    """Look for so many seconds; return what is wrong at the last look."""
    standstill, wrong = Standstill(HANG_S), None
    for number in range(round(seconds / LOOK_S) + 1):
        assert wrong is None
        wrong = standstill.see(number if beats else 7, call(number), busy, LOOK_S)
    return wrong


def test_what_is_silent_and_idle_stands_still_and_what_computes_gets_more_time() -> None:
    assert _look(LIFELESS_S - LOOK_S) is None
    assert _look(LIFELESS_S) == "has shown no sign of life for 3 s"
    assert _look(HANG_S - LOOK_S, busy=True) is None
    assert _look(HANG_S, busy=True) == "has computed for 20 s without a sign of life"


def test_a_call_that_does_not_end_is_a_hang_and_one_that_computes_gets_more_time() -> None:
    assert _look(HANG_S - LOOK_S, beats=True, call=lambda _: 3) is None
    assert _look(HANG_S, beats=True, call=lambda _: 3) == "has waited in one call for 20 s"
    long_s = PATIENCE_WITH_WORK * HANG_S
    assert _look(long_s - LOOK_S, beats=True, call=lambda _: 3, busy=True) is None
    assert _look(long_s, beats=True, call=lambda _: 3, busy=True) == "has computed in one call for 200 s"


def test_calls_that_end_and_none_at_all_are_no_hang() -> None:
    assert _look(10 * HANG_S, beats=True, call=lambda number: number) is None
    assert _look(10 * HANG_S, beats=True) is None


def test_a_pulse_is_read_by_the_servers_parent_and_goes_in_order() -> None:
    code = (
        "import sys; from inflight.shared_counters import start_pulse; pulse = start_pulse('tensorrt_llm')\n"
        "for line in sys.stdin:\n"
        "    with pulse.in_call():\n"
        "        print('in', flush=True); sys.stdin.readline()\n"
        "    pulse.close(); print('out', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdin.write(b"\n")
        stage.stdin.flush()
        stage.stdout.readline()
        name, pulse = read_pulses(os.getpid())[stage.pid]
        assert (name, pulse.call, pulse.closed) == ("tensorrt_llm", 1, False)
        before = pulse.beats
        while pulse.beats == before:
            assert stage.poll() is None
        stage.stdin.write(b"\n")
        stage.stdin.flush()
        stage.stdout.readline()
        assert (pulse.call, pulse.closed) == (None, True)
        stage.kill()


def test_a_call_counts_while_it_runs() -> None:
    pulse = start_pulse("test")
    try:
        with pulse.in_call():
            assert pulse.call == 1
        assert pulse.call is None
    finally:
        pulse.close()


def test_how_a_process_ended_that_was_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as child:
        state = look_at(child.pid)
        assert state is not None
        assert not state.ended
        child.send_signal(signal.SIGSEGV)
        while (state := look_at(child.pid)) is not None and not state.ended:
            pass
        assert state is not None
        assert state.exit_status & 0x7F == signal.SIGSEGV
        child.wait()
        assert look_at(child.pid) is None
    assert (in_words(-9), in_words(1), in_words(-64)) == ("on SIGKILL", "with code 1", "on SIGRTMAX")


@pytest.mark.parametrize(
    ("before", "now", "waits"),
    [
        (ThreadState("R", 7), ThreadState("R", 7), True),
        (ThreadState("S", 7), ThreadState("D", 8), True),
        (ThreadState("R", 7), ThreadState("R", 8), False),
        (ThreadState("S", 7), ThreadState("R", 7), False),
        (ThreadState("R", 7), ThreadState("S", 8), False),
        (ThreadState("T", 7), ThreadState("T", 7), False),
        (ThreadState("R", None), ThreadState("R", None), False),
        (None, ThreadState("R", 7), False),
    ],
    ids=["starved", "disk", "woken", "wakes", "sleeps", "stopped", "not told", "new"],
)
def test_what_holds_a_process_up(before: ThreadState | None, now: ThreadState, waits: bool) -> None:
    idle = {"1": ThreadState("S", 3)}
    earlier = idle if before is None else idle | {"2": before}
    assert waits_for_machine(earlier, idle | {"2": now}) is waits


def test_a_starved_process_is_busy_and_a_stopped_one_is_not() -> None:
    """This one gets a processor only where no other process wants one, and never sleeps."""
    endless = (
        "import os, sys; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)); os.close(1)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, "-c", endless], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()
        try:
            before = look_at_threads(child.pid)
            while not waits_for_machine(before, now := look_at_threads(child.pid)):
                before = now
            child.send_signal(signal.SIGSTOP)
            while (state := look_at(child.pid)) is not None and not state.stopped:
                pass
            stopped = look_at_threads(child.pid)
            assert stopped
            assert not waits_for_machine(stopped, look_at_threads(child.pid))
        finally:
            child.kill()


def test_a_group_has_gone_once_none_of_it_runs() -> None:
    command = ["bash", "-c", "sleep 60 & echo $!"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        left = int(child.stdout.readline())
        child.wait()
        assert look_at(left) is not None
        threading.Timer(0.5, os.kill, (left, signal.SIGKILL)).start()
        wait_for_group(child.pid, 30)
        state = look_at(left)
        assert state is None or state.ended


STAGE = """
import sys, time
from inflight.shared_counters import start_pulse
pulse = start_pulse("engine")
print("ready", flush=True)
sys.stdin.readline()
with pulse.in_call():
    {does}
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("does", "hang_timeout_s", "hurt", "said"),
    [
        ("time.sleep(60)", 60, signal.SIGKILL, "the stage engine ended on SIGKILL"),
        ("time.sleep(60)", 60, signal.SIGSTOP, "the stage engine has shown no sign of life for 3 s (it is stopped)"),
        ("import ctypes; ctypes.PyDLL(None).sleep(60)", 60, None, "the stage engine has shown no sign of life for 3 s"),
        # The limit is longer than a look can count: one look after the machine stood still must not decide.
        ("sum(iter(lambda: 1, 0))", 1.5, None, "the stage engine has computed in one call for 15 s"),
        ("time.sleep(60)", 1, None, "the stage engine has waited in one call for 1 s"),
        ("sys.exit(3)", 60, None, "the stage engine ended with code 3"),
        ("pulse.close(); sys.exit(3)", 60, None, None),
        ("time.sleep(4)", None, signal.SIGSTOP, None),
    ],
    ids=["killed", "stopped", "caught", "endless", "waiting", "ended", "in order", "not watched"],
)
def test_what_is_said_of_a_stage(
    does: str, hang_timeout_s: float | None, hurt: signal.Signals | None, said: str | None
) -> None:
    """With this process in the server's place, and a port where nobody answers: a server that refuses lives too."""
    command = [sys.executable, "-c", STAGE.format(does=does)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as stage:
        assert stage.stdin is not None
        assert stage.stdout is not None
        stage.stdout.readline()
        try:
            with Vitals(os.getpid(), "127.0.0.1", 1, 1, hang_timeout_s, math.inf) as vitals:
                assert vitals.look() is None
                stage.stdin.close()
                if hurt is not None:
                    stage.send_signal(hurt)
                assert _first_end(vitals, stage.pid) == said
        finally:
            stage.kill()
            for record in SHARED_MEMORY.glob(f"inflight_{os.getpid()}_pulse_*"):
                record.unlink()


def test_a_stage_that_waits_for_a_processor_is_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two looks go by before it is known to wait; each counts for half a second at the most.
    monkeypatch.setattr(vitals_module, "LIFELESS_S", 1.2)
    monkeypatch.setattr(vitals_module, "look_at_threads", lambda _: {"1": ThreadState("R", 7)})
    silent = "import ctypes; ctypes.PyDLL(None).sleep(60)"
    test_what_is_said_of_a_stage(silent, 2.5, None, "the stage engine has computed for 2.5 s without a sign of life")


def test_a_stage_that_waits_for_a_stopped_server_is_not_at_fault() -> None:
    """The stage holds Python's lock meanwhile, as in a response that it hands to Triton: it shows no sign of life."""
    stage = STAGE.format(does="import ctypes; ctypes.PyDLL(None).sleep(60)")
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stage!r}])"
    command = [sys.executable, "-c", parent]
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdout.readline()
        silent = mute.getsockname()[1]
        try:
            with Vitals(server.pid, "127.0.0.1", silent, silent, 60, 40) as vitals:
                server.stdin.close()
                server.send_signal(signal.SIGSTOP)
                while (end := vitals.look()) is None:
                    time.sleep(LOOK_S)
            assert end == End("server_hung", "the server has shown no sign of life for 3 s (it is stopped)")
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            for record in SHARED_MEMORY.glob(f"inflight_{server.pid}_pulse_*"):
                record.unlink()


def test_a_night_in_which_the_whole_machine_stood_still_is_not_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This process stands in for the server, and nobody listens on port 1."""
    clock = 0.0
    monkeypatch.setattr(vitals_module, "time", SimpleNamespace(monotonic=lambda: clock))
    with Vitals(os.getpid(), "127.0.0.1", 1, 1, 60, 60) as vitals:
        for _ in range(3):
            assert vitals.look() is None
            clock += 8 * 3600


@pytest.mark.proof
def test_a_server_hangs_only_where_neither_http_nor_grpc_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this process in the server's place. Large bodies can keep Triton's HTTP threads busy for minutes."""
    monkeypatch.setattr(vitals_module, "_PROBE_S", 0.1)
    monkeypatch.setattr(vitals_module, "_PROBE_TIMEOUT_S", 0.2)
    lives = grpc.server(ThreadPoolExecutor(1))
    port = lives.add_insecure_port("127.0.0.1:0")
    lives.start()
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            silent = mute.getsockname()[1]
            assert _end_of_this_process(silent, port, 2 * LIFELESS_S) is None
            hung = End("server_hung", "the server has shown no sign of life for 3 s")
            assert _end_of_this_process(silent, silent, 60) == hung
    finally:
        lives.stop(None).wait()


@pytest.mark.proof
def test_a_server_that_has_closed_its_ports_gets_the_time_that_an_end_may_take() -> None:
    """With this process in the server's place, and a port where nobody listens."""
    hung = End("server_hung", "the server has closed its ports and has not ended within 2 s")
    assert _end_of_this_process(1, 1, 60) == hung
    assert _end_of_this_process(1, 1, 4, hang_timeout_s=None) is None


def test_a_pulse_that_goes_while_it_is_looked_for_is_none() -> None:
    gone = SHARED_MEMORY / f"inflight_{os.getpid()}_pulse_1_test"
    gone.symlink_to("nowhere")  # it is listed, and cannot be opened
    try:
        assert read_pulses(os.getpid()) == {}
    finally:
        gone.unlink()


def test_pulses_that_another_user_has_made_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = SHARED_MEMORY / f"inflight_{os.getpid()}_pulse_2_test"
    pulse = start_pulse("test")
    try:
        assert os.getpid() in read_pulses(os.getppid())
        monkeypatch.setattr("inflight.shared_counters.os.geteuid", lambda: os.getuid() + 1)
        assert os.getpid() not in read_pulses(os.getppid())
        monkeypatch.undo()
        beside.touch()  # it has no counters to read
        assert read_pulses(os.getpid()) == {}
        beside.unlink()
        os.mkfifo(beside)  # it never opens
        assert read_pulses(os.getpid()) == {}
    finally:
        pulse.close()
        beside.unlink(missing_ok=True)


def _end_of_this_process(
    http_port: int, grpc_port: int, seconds: float, hang_timeout_s: float | None = 60
) -> End | None:
    with Vitals(os.getpid(), "127.0.0.1", http_port, grpc_port, hang_timeout_s, 2) as vitals:
        for _ in range(round(seconds / LOOK_S)):
            time.sleep(LOOK_S)
            if (end := vitals.look()) is not None:
                return end
    return None


def _first_end(vitals: Vitals, stage: int) -> str | None:
    """Return what is first said; None: nothing until it has ended, or is still stopped after some time."""
    until = time.monotonic() + 60
    still = 0.0
    while True:
        state = look_at(stage)  # before the vitals look: an end that comes in between is theirs to tell
        if (end := vitals.look()) is not None:
            return end.text
        assert time.monotonic() < until
        still += LOOK_S
        if state is None or state.ended or (state.letter == "T" and still > LIFELESS_S + 1):
            return None
        time.sleep(LOOK_S)
