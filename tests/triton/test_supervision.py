"""`inflight serve` comes back: what ends or hangs under streams ends them with a typed error, and others are served.

One command for all of them; each finds the server that the one before it made start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from inflight.addresses import read_directly
from inflight.client import AsyncClient, AsyncHttpClient, Retry
from inflight.client.errors import ServerUnreachable
from inflight.client.request import GenerateOptions
from inflight.errors import DeploymentError, InflightError
from inflight.serve import restarts as serve_restarts
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.serve.supervisor import Supervisor
from inflight.serve.vitals import End
from inflight.settings.deployment import load_deployment
from inflight.shared_counters import SHARED_MEMORY, read_pulses
from tests.support.waiting import wait_until
from tests.triton.support.servers import on_engine

INFLIGHT = str(Path(sys.executable).with_name("inflight"))
_WITH_MANY_STARTS = """
from inflight.cli import app
from inflight.serve import restarts as serve_restarts
serve_restarts.PAUSES_S = (0,) * 100
app()
"""
"""`inflight` that starts a server again at once, as often as these tests end it in a row."""
PATIENCE_S = 120.0
STREAMS = 4
LONG = GenerateOptions(max_tokens=1900, ignore_eos=True)


@dataclass
class Command:
    """A running `inflight serve`, with folders of its own."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int
    metrics_port: int
    said_path: Path
    temporary: Path
    state: Path

    @property
    def said(self) -> str:
        return self.said_path.read_text()

    @property
    def server(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        [server] = [child for child in children if not _is_gateway(child)]
        return server

    def process_of(self, name: str) -> int:
        """Return the process id of a stage, or of the ``server``."""
        server = self.server.pid
        return {stage: process for process, (stage, _) in read_pulses(server).items()}.get(name, server)

    def wait_until_said(self, pattern: str, count: int = 1) -> None:
        until = time.monotonic() + PATIENCE_S
        while len(re.findall(pattern, self.said)) < count:
            assert time.monotonic() < until, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.05)


def _is_gateway(process: psutil.Process) -> bool:
    """Return whether a process is the gateway; one that has ended, and waits for its parent, has no command."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return "inflight.gateway" in process.cmdline()
    return False


_HEEDS_HANGUP = ("env", "--default-signal=HUP")
"""Where a script runs the tests with nohup, SIGHUP is ignored, and a child would inherit that."""


def _start(directory: Path, terminal: int | None = None, inflight: Sequence[str] = (INFLIGHT,)) -> Command:
    replay = on_engine("replay", directory, engine={"replay_step_ms": 5})  # of the engines it starts soonest
    http, grpc, metrics, gateway = free_ports(4)
    numbers = {"http": http, "grpc": grpc, "metrics": metrics, "gateway": gateway}
    ports = [f"--{name}-port={port}" for name, port in numbers.items()]
    temporary, state, said = directory / "tmp", directory / "state", directory / "said"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_STATE_HOME": str(state)}
    with said.open("w") as file:
        process = subprocess.Popen(
            [
                *_HEEDS_HANGUP,
                *(["setsid", "--ctty"] if terminal is not None else []),
                *inflight,
                "serve",
                str(replay),
                *ports,
            ],
            stdin=terminal if terminal is not None else subprocess.DEVNULL,
            stderr=terminal if terminal is not None else file,
            start_new_session=terminal is None,
            env=environment,
        )
    return Command(process, http, grpc, metrics, said, temporary, state)


def _assert_nothing_left(command: Command) -> None:
    assert not list(command.temporary.iterdir())
    assert not list(SHARED_MEMORY.glob(f"*inflight_{command.process.pid}_*"))


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    python = (sys.executable, "-c", _WITH_MANY_STARTS)
    command = _start(tmp_path_factory.mktemp("serve"), inflight=python)
    try:
        command.wait_until_said("Ctrl-C stops it")
        yield command
        shared = {path.name for process in [command.server.pid] for path in SHARED_MEMORY.glob(f"inflight_{process}_*")}
        assert len([name for name in shared if "pulse" in name]) == 3, "nothing of those before is left"
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(PATIENCE_S) == 0
        _assert_nothing_left(command)
    finally:
        command.process.kill()


async def _stream(client: AsyncClient | AsyncHttpClient, runs: asyncio.Event) -> object:
    try:
        async with client.stream("hello", LONG) as stream:
            async for _ in stream:
                runs.set()
            return stream.completion().finish_reason
    except InflightError as error:
        return error
    finally:
        runs.set()


async def _under_streams(command: Command, hurt: str, number: signal.Signals) -> list[object]:
    """Have streams run over both protocols, send the signal, and return how they end."""
    async with (
        AsyncClient(f"127.0.0.1:{command.grpc_port}") as grpc,
        AsyncHttpClient(f"127.0.0.1:{command.http_port}") as http,
    ):
        await grpc.wait_ready(PATIENCE_S)
        running = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(_stream((grpc, http)[place % 2], running[place])) for place in range(STREAMS)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in running)), PATIENCE_S)
        if not any(task.done() for task in tasks):
            os.kill(command.process_of(hurt), number)
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


async def _hurt(command: Command, hurt: str, number: signal.Signals) -> list[object]:
    """Hurt it under streams, and return how they end when it serves again."""
    before = command.said.count("ready again in")
    ends = await _under_streams(command, hurt, number)
    command.wait_until_said("ready again in", before + 1)
    return ends


async def _ask(command: Command) -> str | None:
    async with AsyncClient(f"127.0.0.1:{command.grpc_port}", retry=Retry(attempts=1)) as client:
        await client.wait_ready(PATIENCE_S)
        return (await client.generate("hello", GenerateOptions(max_tokens=4))).finish_reason


@pytest.mark.parametrize(
    ("hurt", "number", "said"),
    [
        pytest.param("tokenizer", signal.SIGKILL, "the stage tokenizer ended on SIGKILL", marks=pytest.mark.proof),
        ("tensorrt_llm", signal.SIGKILL, "the stage tensorrt_llm ended on SIGKILL"),
        pytest.param("detokenizer", signal.SIGKILL, "the stage detokenizer ended on SIGKILL", marks=pytest.mark.proof),
        pytest.param(
            "tensorrt_llm",
            signal.SIGSTOP,
            r"the stage tensorrt_llm has shown no sign of life for 3 s \(it is stopped\)",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "server",
            signal.SIGSEGV,
            r"the server ended on SIGSEGV: its log does not say why",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "server",
            signal.SIGSTOP,
            r"the server has shown no sign of life for 3 s \(it is stopped\)",
            marks=pytest.mark.proof,
        ),
    ],
)
async def test_supervisor_restarts_what_is_hurt_and_streams_end_with_a_typed_error(
    command: Command, hurt: str, number: signal.Signals, said: str
) -> None:
    restarts = command.said.count("ready again in")
    ends = await _hurt(command, hurt, number)
    assert [type(end) for end in ends] == [ServerUnreachable] * STREAMS, ends
    kept = command.state / f"inflight/crash-{command.http_port}.log"
    line = rf"^inflight: {said}; the server restarts in \d+ s; its log is kept in {kept}$"
    assert re.search(line, command.said, re.MULTILINE), command.said
    assert "tensorrt_llm" in kept.read_text()
    assert await _ask(command) in ("stop", "length")
    page = read_directly(f"http://127.0.0.1:{command.metrics_port}/metrics", 30).decode()
    counted = sum(map(float, re.findall(r"^inflight_restarts_total{.*} (\S+)$", page, re.MULTILINE)))
    assert counted == len(re.findall(r"restarts in \d+ s", command.said)) >= restarts + 1


@pytest.mark.proof
def test_serve_ends_with_its_terminal_and_leaves_nothing(tmp_path: Path) -> None:
    """The kernel sends SIGHUP then, and each word that is written fails."""
    ours, its = pty.openpty()
    command = _start(tmp_path, its)
    os.close(its)
    said = b""
    while b"Ctrl-C stops it" not in said:
        said += os.read(ours, 4096)
    os.close(ours)
    assert command.process.wait(PATIENCE_S) == 0
    _assert_nothing_left(command)


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_serve_ended_at_its_start_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = _start(tmp_path)
    assert wait_until(lambda: list(command.temporary.glob("inflight-*/triton.log")), PATIENCE_S, every_s=0.01)
    command.process.send_signal(number)
    assert command.process.wait(PATIENCE_S) == 0
    _assert_nothing_left(command)


@pytest.mark.proof
def test_supervisor_gives_up_after_a_row_of_crashes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_restarts, "PAUSES_S", (0,))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    directory = on_engine("replay", tmp_path)
    server = TritonServer(directory, override_server(load_deployment(directory), ports))
    caplog.set_level(logging.WARNING)
    folders: set[Path] = set()

    def crash_once_ready(self: Supervisor, done: threading.Event) -> End | None:
        if self.status.ready:  # it watches no start
            folders.update(Path("/tmp").glob(f"if-{server.log_path.parent.name[-8:]}*"))
            server.process.send_signal(signal.SIGABRT)
        return watch_until(self, done)

    watch_until = Supervisor._watch_until
    monkeypatch.setattr(Supervisor, "_watch_until", crash_once_ready)
    supervisor = Supervisor(server)
    try:
        supervisor.start()
        with pytest.raises(DeploymentError) as raised:
            supervisor.keep_serving()
    finally:
        server.stop()
    why = "the server ended on SIGABRT: its log does not say why"
    assert str(raised.value).startswith(f"{why}; `inflight serve` gives up after 1 "), raised.value
    assert f"its log is kept in {tmp_path}/inflight/crash-{ports['http_port']}.log" in str(raised.value)
    assert f"{why}; the server restarts in 0 s" in caplog.text
    assert not list(SHARED_MEMORY.glob(f"*inflight_{os.getpid()}_{ports['http_port']}_*"))
    assert folders, "Triton makes one at each start, and a crash leaves it"
    assert not [folder for folder in folders if folder.exists()]
