"""``inflight door``: several servers behind one door."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from typer.testing import CliRunner

from inflight.cli import app
from inflight.serve.server import free_ports
from tests.door.support.doors import DEMO, Recorder, send
from tests.support.fake_server import FakeServer
from tests.support.waiting import wait_until


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "inflight", "door", str(folder), *arguments]


@pytest.fixture
def deployment(tmp_path: Path) -> tuple[Path, int]:
    """A directory of a deployment, and its HTTP port."""
    http, rpc, metrics, gateway = free_ports(4)
    settings = {
        "model": str((DEMO / "model").resolve()),
        "server": {"http_port": http, "grpc_port": rpc, "metrics_port": metrics, "exit_timeout_s": 2},
        "gateway": {"port": gateway},
    }
    (tmp_path / "deployment.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path, http


@contextmanager
def running(*arguments: str, port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command until the end of the test."""
    process = subprocess.Popen(command(folder, *arguments), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.wait()


def test_replicas_take_turns_and_what_one_refuses_another_does(deployment: tuple[Path, int]) -> None:
    folder, port = deployment
    first, second = Recorder("first"), Recorder("second")

    def ask(path: str = "/v1/models") -> str:
        return str(send(port, f"GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()).json["server"])

    def turns() -> bool:
        return set(Counter(ask() for _ in range(6)).values()) == {3}

    with running("--replica", first.address, "--replica", second.address, port=port, folder=folder) as process:
        assert wait_until(turns)
        first.status, first.headers = 503, {"x-should-retry": "true"}  # as a server that drains says
        assert {ask() for _ in range(8)} == {"second"}
        assert wait_until(lambda: any(one["path"] == "/v2/health/ready" for one in first.requests))
        first.status, first.headers = 200, {}
        assert wait_until(turns)
        first.breaks = 1_000
        assert {ask() for _ in range(8)} == {"second"}
        assert send(port, b"GET /live HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").status == 200
        assert send(port, b"GET /status HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").status == 404
        first.close()
        second.close()
        assert wait_until(lambda: send(port, b"GET /v2 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").status == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_grpc_goes_to_the_ports_that_are_named(deployment: tuple[Path, int]) -> None:
    folder, port = deployment
    http = Recorder("http")
    with FakeServer() as triton:
        replica = f"{http.address}:{triton.grpc_port}:{http.address.rpartition(':')[2]}"
        with (
            running("--replica", replica, "--replica", replica, port=port, folder=folder),
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub = GRPCInferenceServiceStub(channel)
            assert stub.ServerReady(pb.ServerReadyRequest(), wait_for_ready=True).ready
    http.close()


def test_the_files_for_an_envoy_elsewhere(deployment: tuple[Path, int], tmp_path: Path) -> None:
    folder, _ = deployment
    out = tmp_path / "out"
    arguments = ["--replica", "replica-1:8000", "--replica", "replica-2:8000", "--host", "0.0.0.0"]
    runner = CliRunner()
    written = runner.invoke(app, ["door", str(folder), *arguments, "--write", str(out), "--seen-as", "/etc/inflight"])
    assert written.exit_code == 0, written.output
    start = json.loads((out / "envoy.json").read_text())
    assert not start["admin"]["address"]["pipe"]["path"].startswith("/etc/inflight")  # it may be read-only there
    assert '"/etc/inflight/routes.json"' in (out / "envoy.json").read_text()
    assert {file.name for file in out.iterdir()} == {"envoy.json", "routes.json"}
    wrong = runner.invoke(app, ["door", str(folder), "--replica", "nowhere"])
    assert (wrong.exit_code, "--replica nowhere: it must be host:port" in wrong.output) == (1, True)
