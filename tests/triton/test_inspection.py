"""`inspect` and `inflight top` on a real server under load, on both engines."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight.client import Client, GenerateOptions
from inflight.engine.snapshot import Snapshot
from inflight.serve.installation import find_installation
from inflight.serve.server import TritonServer
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_metric, settled_page
from tests.triton.support.servers import Running, on_engine, run
from tests.triton.support.tensors import grpc_inputs

INFLIGHT = Path(sys.executable).parent / "inflight"
GONE = "the server does not answer"
HOME = "\x1b[H"
"""Begins each frame: the cursor goes to the first line."""
LONG = GenerateOptions(max_tokens=1500, ignore_eos=True)


def inspect(server: Running, **more: object) -> Snapshot:
    """Ask the engine stage, as any client may."""
    answers: list[bytes] = []
    failed: list[InferenceServerException] = []
    came = threading.Event()

    def take(result: grpc.InferResult | None, error: InferenceServerException | None) -> None:
        if error is not None:
            failed.append(error)
        elif result is not None and result.as_numpy("snapshot") is not None:
            answers.append(result.as_numpy("snapshot").item())
        came.set()

    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        client.async_stream_infer("tensorrt_llm", grpc_inputs("tensorrt_llm", {"inspect": True, **more}))
        assert came.wait(30)
        client.stop_stream()
    if failed:
        raise failed[0]
    return Snapshot.from_json(answers[0].decode())


@contextmanager
def streaming(server: Running, count: int) -> Iterator[None]:
    """Keep so many requests running: one that ends is asked again. Their lengths differ, or all would end at once."""
    over = threading.Event()

    def ask(client: Client, number: int) -> None:
        name, options = f"tell-{number} me a story", replace(LONG, max_tokens=LONG.max_tokens + 130 * number)
        while not over.is_set():
            with client.stream(f"Say {name}", options, request_id=name) as stream:
                for _ in stream:
                    if over.is_set():
                        break

    with Client(server.grpc) as client:
        client.wait_ready()
        threads = [threading.Thread(target=ask, args=(client, number)) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            assert wait_until(lambda: read_metric(server.metrics, "inflight_running_requests") == count, 30)
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(20)
            # A server that is stopped in the moment of a cancellation waits for it, for all of its exit timeout.
            wait_until(lambda: read_metric(server.metrics, "inflight_running_requests") == 0, 20)


def test_inspect_snapshot_is_true(server: Running) -> None:
    with streaming(server, 3):
        shots: list[Snapshot] = []

        def all_decode() -> bool:
            shots.append(inspect(server))
            return [one.generated_tokens > 2 for one in shots[-1].requests] == [True] * 3

        assert wait_until(all_decode, 30)
        shot = shots[-1]
        assert (shot.engine, shot.running, shot.waiting) == (server.engine, 3, 0)
        assert sorted(one.request_id for one in shot.requests) == ["tell-0 m…", "tell-1 m…", "tell-2 m…"]
        assert sorted(one.max_tokens for one in shot.requests) == [1500, 1630, 1760]
        for one in shot.requests:
            assert one.state == "decode"
            assert one.generated_tokens < one.max_tokens
            assert one.tokens_per_second is not None
        assert shot.kv_cache is not None
        assert shot.kv_cache.used > 0
        assert shot.kv_cache.used + (shot.kv_cache.cached or 0) + shot.kv_cache.free == shot.kv_cache.num_blocks
        assert bool(shot.kv_cache.runs) == (server.engine == "pytorch")
        steps = shot.steps
        assert wait_until(lambda: inspect(server).steps > steps, 30)
    assert wait_until(lambda: inspect(server).requests == (), 30)


def test_inspect_refuses_other_inputs(server: Running) -> None:
    def counted(outcome: str) -> float:
        return read_metric(server.metrics, "inflight_requests_total", model="tensorrt_llm", outcome=outcome)

    settled_page(server.metrics)  # another test's request may still be counted
    invalid, length = counted("invalid"), counted("length")
    with pytest.raises(InferenceServerException, match="inspect goes alone; the request has input_ids, stream"):
        inspect(server, input_ids=[1, 2], streaming=True)
    with Client(server.grpc) as client:
        client.generate("hello", GenerateOptions(max_tokens=4, ignore_eos=True))
    assert wait_until(lambda: counted("length") > length, 30)
    assert counted("invalid") == invalid, "what does not generate is no request"


@pytest.mark.proof
def test_top_once_shows_a_loaded_server(server: Running, tmp_path: Path) -> None:
    shown = ""

    def loaded() -> bool:
        """Where clients get less of the processor than the engine, it may have answered all of them ahead of time."""
        nonlocal shown
        shown = _top(server, "--once", "--after", "1", "--svg", str(tmp_path / "top.svg"))
        return "tell-" in shown and "decode" in shown

    with streaming(server, 3):
        assert wait_until(loaded, 60), shown
    assert "throughput" in shown
    assert f"engine {server.engine}" in shown
    assert "no requests" not in shown
    assert "no rates" not in shown
    picture = (tmp_path / "top.svg").read_text()
    assert picture.startswith("<svg")
    assert "url(http" not in picture


@pytest.mark.proof
def test_top_once_shows_a_unary_server(unary_server: Running) -> None:
    shown = _top(unary_server, "--once", "--after", "0.2")
    assert "no requests and" not in shown
    assert "no rates" not in shown


def test_top_once_over_http(server: Running) -> None:
    shown = _top(server, "--once", "--after", "0.2", url=server.http)
    assert f"engine {server.engine}" in shown


@pytest.mark.proof
def test_inspection_false_refuses_inspect_and_top_shows_the_rest(tmp_path: Path) -> None:
    for server in run(on_engine("replay", tmp_path, observability={"inspection": False})):
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED: inspect is not allowed: observability.insp"):
            inspect(server)
        shown = _top(server, "--once", "--after", "0.2")
        assert "no requests and no block map: inspect is not allowed" in " ".join(shown.split())
        assert f"0 of {server.server.deployment.batching.max_batch_size}" in shown


@pytest.mark.proof
def test_top_survives_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    for server in run(on_engine("replay", tmp_path)):
        with _Terminal("top", "--url", server.grpc, "--metrics", server.metrics.split("//")[1].split("/")[0]) as live:
            assert live.shows("engine replay", without=GONE)
            server.server.stop(at_once=True)
            assert live.shows(GONE + "; last seen")
            live.forget()
            with TritonServer(tmp_path, server.server.deployment, find_installation()) as again:
                again.wait_ready(180)
                assert live.shows("engine replay", without=GONE)
                live.press("xyq")
                assert live.wait() == 0


class _Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        master, slave = pty.openpty()
        self._master, self._seen = master, ""
        environment = os.environ | {"COLUMNS": "120", "LINES": "50", "TERM": "xterm"}
        command = [str(INFLIGHT), *arguments, "--interval", "0.2"]
        self._process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment)
        os.close(slave)

    def shows(self, *words: str, without: str = "nothing") -> bool:
        """Wait until a whole frame has the words."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for frame in self._seen.split(HOME)[1:-1]:
                if all(word in frame for word in words) and without not in frame:
                    return True
            if select.select([self._master], [], [], 0.2)[0]:
                self._seen += os.read(self._master, 65536).decode(errors="replace")
        return False

    def forget(self) -> None:
        """Wait for frames that are to come."""
        self._seen = ""

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait(self) -> int:
        return self._process.wait(60)

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


def _top(server: Running, *arguments: str, url: str = "") -> str:
    metrics = f"127.0.0.1:{server.metrics_port}"
    done = subprocess.run(
        [str(INFLIGHT), "top", "--url", url or server.grpc, "--metrics", metrics, *arguments],
        capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
