"""`inflight serve` with the door owns its ports from the first second to the last, whatever dies behind them.

One command for all of it, on the engine that starts soonest: its start, its restarts, and its end.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from inflight.client.request import GenerateOptions
from inflight.client.sync import HttpClient
from inflight.serve.leftovers import sweep
from inflight.serve.server import free_ports
from inflight.shared_counters import SHARED_MEMORY
from tests.support.waiting import wait_until
from tests.triton.support.servers import on_engine

pytestmark = pytest.mark.proof
pytest.importorskip("envoy", reason="the door is Envoy, of the extra `door`")
INFLIGHT = str(Path(sys.executable).with_name("inflight"))
PATIENCE_S = 180
_WORDS = {"gateway": "inflight.gateway", "door": "envoy", "triton": "--model-repository"}
"""What the command line has of a part."""


@dataclass
class Serve:
    """A running `inflight serve` with the door."""

    process: subprocess.Popen[bytes]
    port: int
    others: list[int]
    said_path: Path
    temporary: Path

    @property
    def said(self) -> str:
        return self.said_path.read_text()

    def process_of(self, part: str) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        [found] = [child for child in children if any(_WORDS[part] in word for word in child.cmdline())]
        return found

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        """Return the answer on a connection of its own. Raises OSError: nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=PATIENCE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def restarts(self) -> dict[str, int]:
        counts: dict[str, int] = json.loads(self.get("/status")[1])["restarts"]
        return {cause: count for cause, count in counts.items() if count}

    def has_restarted(self, **causes: int) -> bool:
        """Return whether there were so many new starts, and no other is under way.

        Triton may have been started again more often: it aborts where the machine stands still.
        """
        counts = self.restarts()  # first: a part that has just ended is not noticed yet, and all is ready
        return all(counts.get(cause, 0) >= count for cause, count in causes.items()) and self.get("/ready")[0] == 200


class Watch:
    """Asks the door again and again, each time on a new connection, and keeps what it has seen."""

    def __init__(self, serve: Serve, path: str) -> None:
        self.seen: list[object] = []
        self._serve, self._path, self._ends = serve, path, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self.seen.append(self._serve.get(self._path)[0])
            except (OSError, http.client.HTTPException) as error:
                self.seen.append(error)
            if self._ends.wait(0.05):
                return


def _start(directory: Path, said: Path) -> Serve:
    ports = free_ports(4)
    names = zip(("http", "grpc", "metrics", "gateway"), ports, strict=True)
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    command = [INFLIGHT, "serve", str(directory), "--door", *(f"--{name}-port={port}" for name, port in names)]
    environment = os.environ | {"TMPDIR": str(temporary), "XDG_STATE_HOME": str(directory / "state")}
    with said.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True, env=environment)
    return Serve(process, ports[0], ports[1:], said, temporary)


@contextmanager
def _serving(directory: Path) -> Iterator[Serve]:
    settings = {"exit_timeout_s": 2 * PATIENCE_S}  # a test says when it is over
    replay = on_engine("replay", directory, engine={"replay_step_ms": 5}, server=settings)
    serve = _start(replay, directory / "said")
    try:
        yield serve
    finally:
        serve.process.kill()
        serve.process.wait()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """It is not waited for: the first test sees its start."""
    with _serving(tmp_path_factory.mktemp("serve")) as serve:
        yield serve


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_door_answers_while_the_first_start_lasts(serve: Serve) -> None:
    assert wait_until(lambda: _is_taken(serve.port), PATIENCE_S, every_s=0.01), serve.said
    assert serve.get("/live")[0] == 200
    assert serve.get("/ready") == (503, "starting\n")
    assert 'inflight_serve_part_up{part="triton"} 0' in serve.get("/metrics")[1]
    with HttpClient(f"127.0.0.1:{serve.port}") as client:
        assert client.generate("hello", GenerateOptions(max_tokens=4)).text, "it is kept until the server is there"
    assert wait_until(lambda: serve.get("/ready")[0] == 200, PATIENCE_S, every_s=0.05)
    assert wait_until(lambda: "Ctrl-C stops it" in serve.said, PATIENCE_S, every_s=0.05)
    page = serve.get("/metrics")[1]
    assert all(f'inflight_serve_part_up{{part="{part}"}} 1' in page for part in _WORDS)
    assert 'inflight_requests_total{model="tensorrt_llm",outcome="length",version="1"} ' in page, "of all parts"
    assert [serve.get("/v2/health/ready", port)[0] for port in serve.others] == [200] * 3, "each port serves all"
    left = {connection.laddr.port for connection in psutil.Process(serve.process_of("triton").pid).net_connections()}
    assert not left & {serve.port, *serve.others}, "Triton has ports of its own"


@pytest.mark.parametrize(
    ("part", "cause", "said"),
    [
        ("triton", "crash", r"ready again in \S+ s \(ended in \S+ s, started in \S+ s, first token in \S+ s\)"),
        ("gateway", "gateway", "the gateway ended on SIGKILL; it restarts in 0 s"),
    ],
)
def test_the_ports_stay_while_what_is_behind_them_starts_again(serve: Serve, part: str, cause: str, said: str) -> None:
    """A request that comes meanwhile waits at the door, and is answered."""
    before = serve.restarts().get(cause, 0)
    with Watch(serve, "/live") as watch, HttpClient(f"127.0.0.1:{serve.port}") as client:
        serve.process_of(part).kill()
        assert client.generate("hello", GenerateOptions(max_tokens=4)).text
        assert wait_until(lambda: serve.has_restarted(**{cause: before + 1}), PATIENCE_S)
    assert set(watch.seen) == {200}, watch.seen
    series = f'inflight_restarts_total{{cause="{cause}"}} '
    assert wait_until(lambda: f"{series}{serve.restarts()[cause]}\n" in serve.get("/metrics")[1], PATIENCE_S)
    assert re.search(said, serve.said), serve.said


def test_the_door_is_started_again_at_once(serve: Serve) -> None:
    serve.process_of("door").kill()
    assert wait_until(lambda: "the door ended on SIGKILL; it restarts in 0 s" in serve.said, PATIENCE_S)
    assert wait_until(lambda: _is_taken(serve.port), PATIENCE_S, every_s=0.05)
    assert serve.restarts()["door"] == 1
    assert serve.get("/ready")[0] == 200, "what is behind it has not changed"


def test_a_stop_admits_no_more_and_finishes_what_runs(serve: Serve) -> None:
    """It is the last test of the command. More signals do not hurry it."""
    children = psutil.Process(serve.process.pid).children(recursive=True)
    short, endless = (GenerateOptions(max_tokens=count, ignore_eos=True) for count in (200, 100_000))
    with (
        HttpClient(f"127.0.0.1:{serve.port}") as client,
        client.stream("hello", endless) as holds_it_up,
        client.stream("hello", short) as stream,
    ):
        next(iter(holds_it_up))
        next(iter(stream))
        serve.process.terminate()
        assert wait_until(lambda: serve.get("/ready") == (503, "stopping\n"), PATIENCE_S, every_s=0.01)
        serve.process.send_signal(signal.SIGINT)
        serve.process.terminate()
        assert wait_until(lambda: serve.get("/v1/models")[0] == 503, PATIENCE_S, every_s=0.01)
        assert serve.get("/live")[0] == 200
        assert [chunk.finish_reason for chunk in stream][-1] == "length"
    assert serve.process.wait(PATIENCE_S) == 0
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert not list(serve.temporary.iterdir())
    assert not list(SHARED_MEMORY.glob(f"*inflight_{serve.process.pid}_*"))
    assert serve.said.rstrip().endswith("stopping")


def test_a_killed_command_takes_all_along_and_the_next_one_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _serving(tmp_path) as serve:
        assert wait_until(lambda: "Ctrl-C stops it" in serve.said, PATIENCE_S, every_s=0.05), serve.said
        children = psutil.Process(serve.process.pid).children(recursive=True)
        assert len(children) == 7, "Triton, its stages, the gateway and what forks for it, and the door"
        monkeypatch.setattr("tempfile.tempdir", str(serve.temporary))
        sweep()
        left = {*serve.temporary.iterdir()}
        assert len(left) == 4, "it lives"
        began = time.monotonic()
        serve.process.kill()
        assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
        said = f"after {time.monotonic() - began:.1f} s"
    assert not any(map(_is_taken, [serve.port, *serve.others])), said
    assert {*serve.temporary.iterdir()} == left, "nobody is left to remove it"
    backends = [folder for one in left for folder in Path("/tmp").glob(f"if-{one.name[-8:]}*")]
    assert len(backends) == 3, "one of each stage"
    sweep()
    assert not list(serve.temporary.iterdir())
    assert not any(folder.exists() for folder in backends)
    assert not list(SHARED_MEMORY.glob(f"*inflight_{serve.process.pid}_*"))
    assert not list(SHARED_MEMORY.glob(f"inflight_{children[0].pid}_*"))
