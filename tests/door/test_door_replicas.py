"""``inflight door``: several servers behind one door."""

from __future__ import annotations

import hashlib
import json
import signal
import socket
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
from tests.door.support.doors import DEMO, Answer, Recorder, door, send
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


def ask(port: int, path: str, *headers: str, method: str = "GET") -> Answer:
    lines = [f"{method} {path} HTTP/1.1", "host: a", "connection: close", *headers]
    return send(port, "\r\n".join([*lines, "", ""]).encode())


@contextmanager
def running(*arguments: str, port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the command until the end of the test."""
    process = subprocess.Popen(command(folder, *arguments), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("ready" in line for line in process.stderr)  # what other tests have killed may be swept before
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.proof
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


@pytest.mark.proof
def test_replicas_that_are_not_ready_get_no_request_even_where_most_are_not(deployment: tuple[Path, int]) -> None:
    folder, port = deployment
    ready, *others = servers = [Recorder(name) for name in ("ready", "second", "third")]
    for one in others:
        one.known = ("/v1/models",)  # the question whether it is ready gets 404
    replicas = [argument for one in servers for argument in ("--replica", one.address)]
    with running(*replicas, port=port, folder=folder):
        assert wait_until(lambda: ask(port, "/v1/models").status == 200)
        for _ in range(9):
            ask(port, "/v1/models")
        ready.known = ("/v1/models",)
        assert wait_until(lambda: ask(port, "/v1/models").status == 503)
    assert "/v1/models" not in {got["path"] for one in others for got in one.requests}
    for one in servers:
        one.close()


@pytest.mark.proof
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


@pytest.mark.proof
def test_servers_without_a_door_are_asked_by_paths_that_they_have(deployment: tuple[Path, int]) -> None:
    folder, port = deployment
    file = folder / "deployment.yaml"
    file.write_text(file.read_text().replace("exit_timeout_s: 2", "exit_timeout_s: 60"))
    first, second = Recorder("first"), Recorder("second")
    for one in (first, second):
        one.known = ("/v2/health/ready", "/v1/models")  # such as Triton's: /ready is not among them
    addresses = [one.address.rpartition(":")[2] for one in (first, second)]
    replicas = [argument for one in addresses for argument in ("--replica", f"127.0.0.1:{one}:1:{one}")]
    with running(*replicas, port=port, folder=folder) as process:
        assert wait_until(lambda: ask(port, "/ready").status == 200)
        stream = socket.create_connection(("127.0.0.1", port), 60)
        stream.sendall(b"GET /v1/models?events=1 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert wait_until(lambda: any("events" in one["path"] for one in first.requests + second.requests))
        process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: ask(port, "/v1/models").status == 503)
        assert [ask(port, path).status for path in ("/live", "/ready", "/v2/health/ready")] == [200, 503, 503]
        for one in (first, second):
            one.more.release()
        stream.close()
        assert process.wait(60) == 0
    first.close()
    second.close()


def test_doors_behind_a_door_ask_for_the_same_keys(deployment: tuple[Path, int], tmp_path: Path) -> None:
    folder, port = deployment
    keys = tmp_path / "keys"
    keys.write_text("sk-first\n")
    written = yaml.safe_load((folder / "deployment.yaml").read_text())
    written["door"] = {"enabled": True, "api_keys_file": str(keys), "rate_limit": {"requests": 3, "interval_s": 3600}}
    (folder / "deployment.yaml").write_text(yaml.safe_dump(written))
    with (
        door(api_keys_file=keys, behind_a_door=True) as inner,
        running("--replica", f"127.0.0.1:{inner.port}", port=port, folder=folder),
    ):
        bearer = "authorization: Bearer sk-first"
        assert ask(port, "/v1/models").status == 401
        assert ask(port, "/v1/models", bearer).json["server"] == "gateway"
        (got,) = (one["headers"] for one in inner.gateway.requests)
        assert got["x-inflight-client"] == hashlib.sha256(b"sk-first").hexdigest()[:16]
        assert "sk-first" not in json.dumps(got)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = GRPCInferenceServiceStub(channel)
            metadata = (("authorization", "Bearer sk-first"),)
            assert stub.ServerReady(pb.ServerReadyRequest(), metadata=metadata).ready
        assert [ask(port, "/v2", bearer).status for _ in range(2)] == [200, 429]


@pytest.mark.proof
def test_a_door_behind_a_door_lets_another_server_do_what_its_own_cannot(deployment: tuple[Path, int]) -> None:
    folder, port = deployment
    with door("grpc", "http", "gateway", behind_a_door=True) as away, door(behind_a_door=True) as well:
        for relay in away.relays.values():
            relay.cut()
        refused = away.ask("POST", "/v1/messages", body=b"{}")
        assert (refused.status, refused.headers["x-should-retry"]) == (503, "true")
        doors = [f"127.0.0.1:{one.port}" for one in (away, well)]
        with running("--replica", doors[0], "--replica", doors[1], port=port, folder=folder):  # both say: ready
            assert wait_until(lambda: ask(port, "/ready").status == 200)
            paths = ["/v1/messages", "/v2/models/ensemble/generate"] * 4
            assert [ask(port, path, method="POST").status for path in paths] == [200] * 8
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = GRPCInferenceServiceStub(channel)
                assert all(stub.ServerReady(pb.ServerReadyRequest()).ready for _ in range(4))
        asked = [one["path"] for one in away.status.requests + away.http.requests + away.gateway.requests]
        assert set(asked) <= {"/v2/health/ready", "/ready", "/live"}


@pytest.mark.proof
@pytest.mark.parametrize(("server", "path"), [("http", "/v2/models/ensemble/generate"), ("gateway", "/v1/messages")])
def test_what_a_server_broke_under_goes_to_another_one_twice_at_most(
    deployment: tuple[Path, int], server: str, path: str
) -> None:
    folder, port = deployment
    with door(behind_a_door=True) as one, door(behind_a_door=True) as two:
        servers = [getattr(one, server), getattr(two, server)]
        doors = [f"127.0.0.1:{inner.port}" for inner in (one, two)]
        with running("--replica", doors[0], "--replica", doors[1], port=port, folder=folder):
            assert wait_until(lambda: ask(port, "/ready").status == 200)
            for each in servers:
                each.requests.clear()
            servers[0].breaks = 1
            assert [ask(port, path, method="POST").status for _ in range(2)] == [200] * 2
            assert sum(len(each.requests) for each in servers) == 3, "the second one took over"
            for each in servers:
                each.requests.clear()
                each.breaks = 100
            answer = ask(port, path, method="POST")
            assert (answer.status, int(answer.headers["retry-after"]) > 0) == (503, True)
            assert sum(len(each.requests) for each in servers) == 3


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
    for one in ("nowhere", "a:0", "a:65536", "a:1:2:65536"):
        wrong = runner.invoke(app, ["door", str(folder), "--replica", one, "--write", str(tmp_path / "wrong")])
        assert (wrong.exit_code, f"--replica {one}: it must be host:port" in wrong.output) == (1, True)
    assert not (tmp_path / "wrong").exists()
