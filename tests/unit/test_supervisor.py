"""What a supervisor does when its server ends, with a server that does as it is told."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve import command
from inflight.serve import supervisor as module
from inflight.serve.command import StopSignals
from inflight.serve.log import UNKNOWN
from inflight.serve.restarts import PAUSES_S, WELL_S, Restarts
from inflight.serve.status import State
from inflight.serve.supervisor import Supervisor
from inflight.serve.vitals import End
from inflight.settings.deployment import load_deployment
from inflight.settings.server import ServerSettings

DIED = End("stage_died", "the stage tensorrt_llm ended on SIGKILL", killed=True)

GENERATES_NOTHING = "the server has loaded its models, but generates nothing: "


@dataclass(frozen=True)
class Mute:
    """The end of a server that loads its models and generates nothing."""

    error: str = ""
    """Why; empty: ``end`` comes first."""
    end: End | int = 0
    """How it ends; seen only once the request has failed, if ``error`` says that it does."""


_Life = End | int | str | bytes | OSError | Mute


class FakeServer:
    """Each start has a life: the seconds that it serves, and how it ends; bytes: what it logs, and lives on."""

    def __init__(self, directory: Path, lives: list[tuple[float, _Life]]) -> None:
        self.settings, self.stop_timeout_s = ServerSettings(), 40.0
        self.deployment = SimpleNamespace(start_timeout_s=600)
        self.http_url = "http://127.0.0.1:8000"
        self.generates, self.watches = False, 0
        self.restarts = Restarts()
        self.log_path = directory / "triton.log"
        self.lives, self.clock = lives, 0.0
        self.started = False
        self.did: list[str] = []
        self.process: Any = SimpleNamespace(pid=os.getpid(), poll=self._poll, returncode=0)
        self.end: _Life | None = None

    def start(self) -> None:
        assert not self.started
        self.started = True
        self.log_path.write_text("a log")
        self.served_s, self.end = self.lives.pop(0) if self.lives else (0.0, None)
        self.did.append("start")
        if isinstance(self.end, OSError):
            raise self.end

    def wait_ready(self, on_wait: object) -> None:
        if isinstance(self.end, str):
            raise DeploymentError(self.end)

    def generate(self, url: str, timeout_s: float) -> Any:
        """Stand in for ``Generation``."""
        assert (url, timeout_s) == (self.http_url, 600)
        self.generates, self.watches = True, 0
        mute = self.end if isinstance(self.end, Mute) else Mute("none")
        return SimpleNamespace(done=SimpleNamespace(wait=lambda _: self._generated(mute)), error=self._error())

    def _error(self) -> str:
        return self.end.error if isinstance(self.end, Mute) else ""

    def _generated(self, mute: Mute) -> bool:
        self.generates = mute is not self.end  # a life that goes on
        if mute.end or not mute.error:
            self.end = mute.end
        return bool(mute.error)

    def watched(self) -> None:
        """Go on with the life, by the second watch: the first one is that of the generation."""
        self.watches += 1
        self.generates &= self.watches == 1

    def bound_log(self) -> None:
        pass

    def _poll(self) -> int | None:
        if self.generates:
            return None
        if self.end is None:
            raise KeyboardInterrupt
        self.clock += self.served_s
        if isinstance(self.end, bytes):
            with self.log_path.open("ab") as log:
                log.write(self.end)
            return None
        self.process.returncode = self.end
        return self.end if isinstance(self.end, int) else None

    def how(self) -> str:
        return f"with {self.process.returncode}"

    def cause(self) -> str:
        return UNKNOWN

    def stop(self, at_once: bool = False) -> None:
        self.started = False
        self.did.append("kill" if at_once else "stop")


class Run:
    """A supervisor with a fake server, on a fake clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *lives: tuple[float, _Life]) -> None:
        self.server = server = FakeServer(directory, list(lives))
        self.supervisor = Supervisor(server)  # type: ignore[arg-type]
        self.pauses: list[float] = []
        monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
        monkeypatch.setattr(module, "pause", self.pauses.append)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: server.clock))
        monkeypatch.setattr(module, "LOOK_S", 0)
        monkeypatch.setattr(module, "Generation", server.generate)
        monkeypatch.setattr(module, "Vitals", self._vitals)

    def _vitals(self, *_: object) -> Any:
        class Vitals:
            def __enter__(self) -> Any:
                server.watched()
                return SimpleNamespace(
                    look=lambda: end if isinstance(end := server.end, End) and not server.generates else None
                )

            def __exit__(self, *_: object) -> None:
                pass

        server = self.server
        return Vitals()

    def serve(self) -> None:
        self.supervisor.start()
        self.supervisor.keep_serving()


def test_it_is_started_again_whatever_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = Run(tmp_path, monkeypatch, (1, DIED), (1, -11), (1, 0), (0, "no port is free"), (0, OSError(28, "full")))
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert run.server.did == ["start", *["kill", "start"] * 5]
    assert run.pauses == [0, 1, 2, 4, 8]
    counts = {"stage_died": 1, "crash": 1, "exit": 1, "start": 2}
    assert {cause: count for cause, count in run.server.restarts.counts.items() if count} == counts
    assert run.supervisor.status.snapshot()["last_cause"] == "start"
    assert run.supervisor.status.ready
    kept = tmp_path / "state/inflight/crash-8000.log"
    assert kept.read_text() == "a log"
    said = f"{DIED.text}; the server restarts in 0 s; its log is kept in {kept}"
    assert said in caplog.messages
    assert any("the server ended with -11: its log does not say why; the server" in line for line in caplog.messages)
    assert any(
        "the server ended with 0: somebody sent it SIGTERM or SIGINT; the server" in line for line in caplog.messages
    )
    assert any("no port is free; the server restarts in 4 s" in line for line in caplog.messages)
    assert any("[Errno 28] full; the server restarts in 8 s" in line for line in caplog.messages)


def test_a_server_that_generates_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its first start too: it was no wrong setting that loaded all models."""
    hung = Mute(end=End("stage_hung", "the stage tensorrt_llm has waited in one call for 60 s"))
    run = Run(tmp_path, monkeypatch, (1, Mute("status 500: no memory")), (1, hung), (1, Mute(end=-6)))
    states = []
    monkeypatch.setattr(module, "pause", lambda _: states.append(run.supervisor.status.state))
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert run.server.did == ["start", *["kill", "start"] * 3]
    counts = run.server.restarts.counts
    assert (counts["generation"], counts["stage_hung"], counts["crash"]) == (1, 1, 1)
    assert states == [State.RESTARTING] * 3
    assert f"{GENERATES_NOTHING}status 500: no memory; the server restarts in 0 s" in caplog.text
    assert "has waited in one call for 60 s; the server restarts in 1 s" in caplog.text
    assert "the server ended with -6: its log does not say why; the server restarts in 2 s" in caplog.text


@pytest.mark.parametrize(
    ("end", "cause", "said"),
    [(-6, "crash", "the server ended with -6"), (DIED, "stage_died", DIED.text)],
    ids=["server", "stage"],
)
def test_what_dies_in_the_first_generation_is_the_cause_and_not_the_request_that_it_breaks(
    end: End | int,
    cause: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(tmp_path, monkeypatch, (1, Mute("Remote end closed connection", end)))
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert {cause: count for cause, count in run.server.restarts.counts.items() if count} == {cause: 1}
    assert said in caplog.text
    assert GENERATES_NOTHING not in caplog.text


def test_a_server_whose_report_of_a_crash_crashes_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, monkeypatch, (1, b"\nmalloc(): unaligned tcache chunk detected\nSignal (6) received.\n 0# "))
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert run.server.did == ["start", "kill", "start"]
    assert run.server.restarts.counts["crash"] == 1
    assert run.server.clock == 2, "it is let tell of one"
    assert "the server crashes again while it tells of its crash: its log does not say why; the server" in caplog.text


def test_a_row_of_ends_is_given_up_with_the_last_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *[(WELL_S / 2, DIED)] * 10)
    with pytest.raises(DeploymentError, match=f"^{DIED.text}; `inflight serve` gives up after 6 restarts in a row"):
        run.serve()
    assert run.pauses == [*PAUSES_S]
    assert run.server.did[-1] == "kill"


def test_having_served_well_ends_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, *[(1, DIED)] * 3, *[(WELL_S, DIED)] * 20)
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert run.pauses == [0, 1, 2, *[0] * 20]


def test_a_first_start_that_fails_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, (0, f"the server ended with code 1: {UNKNOWN}"))
    with pytest.raises(DeploymentError, match="does not say why; its log is kept in .*crash-8000.log"):
        run.serve()
    assert run.server.did == ["start"]


def test_a_kill_for_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kills = iter([4, 4, 5, 5, 5])  # one more where a watch begins, and where one has ended
    monkeypatch.setattr(module, "killed_for_memory", lambda: next(kills))
    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, monkeypatch, (1, DIED)).serve()
    assert f"{DIED.text}: the kernel killed it for lack of memory; the server restarts" in caplog.text


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
    yield StopSignals()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_pause_at_once(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: StopSignals
) -> None:
    run = Run(tmp_path, monkeypatch, (1, DIED))

    def hour(_: float) -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        threading.Event().wait(3600)

    monkeypatch.setattr(module, "pause", hour)
    with pytest.raises(KeyboardInterrupt):
        run.serve()
    assert run.server.did == ["start", "kill"]


def test_a_signal_waits_for_what_must_be_done_whole(signals: StopSignals) -> None:
    done = []

    def stop_amid_it() -> None:
        with signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        stop_amid_it()
    assert done == ["all"]
    signals.ignore()
    os.kill(os.getpid(), signal.SIGHUP)


def test_a_signal_amid_the_first_words_has_none_of_them_printed_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, signals: StopSignals
) -> None:
    class Interrupting(io.StringIO):
        """SIGTERM comes when the first words have been written."""

        def flush(self) -> None:
            if "ready in" in self.getvalue() and "stopping" not in self.getvalue():
                os.kill(os.getpid(), signal.SIGTERM)

    screen = Interrupting()
    monkeypatch.setattr(command, "_console", Console(file=screen))
    monkeypatch.setattr(command, "_banner", lambda service, seconds: "ready in 1 s")
    monkeypatch.setattr(command, "find_installation", lambda triton: None)
    monkeypatch.setattr(command, "Service", MagicMock())
    command._serve(tmp_path, load_deployment(DEMO), None, signals)
    assert screen.getvalue() == "ready in 1 s\nstopping\n"


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    others = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        StopSignals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        for number, handler in [(signal.SIGHUP, before), *others]:
            signal.signal(number, handler)
