"""The example of HAProxy in place of the door, run by a real one before servers that write down what reaches them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.client import Client
from inflight.serve.server import free_ports
from tests.door.support.doors import Recorder, Relay, send
from tests.support.fake_server import PIECES, FakeServer
from tests.support.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "docs/examples/haproxy.cfg"


class Proxy:
    """A HAProxy that runs, and what is behind it."""

    def __init__(self, port: int, kserve: Recorder, openai: Recorder, triton: FakeServer, relay: Relay) -> None:
        self.port, self.kserve, self.openai, self.triton, self.relay = port, kserve, openai, triton, relay

    def status(self, method: str, path: str, *headers: str, body: bytes = b"") -> int:
        lines = [f"{method} {path} HTTP/1.1", "host: a", "connection: close", *headers]
        lines += [f"content-length: {len(body)}"] if body else []
        return send(self.port, "\r\n".join(lines).encode() + b"\r\n\r\n" + body).status


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    kserve, openai, (port,) = Recorder("kserve"), Recorder("openai"), free_ports(1)
    relay = Relay(openai.address)
    with FakeServer() as triton:
        text = EXAMPLE.read_text().replace("127.0.0.1:9000", f"127.0.0.1:{port}")
        text = text.replace("127.0.0.1:8000", kserve.address).replace("127.0.0.1:8080", relay.address)
        text = text.replace("127.0.0.1:8001", f"127.0.0.1:{triton.grpc_port}")
        file = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
        file.write_text(text)
        process = subprocess.Popen([program, "-db", "-f", str(file)], stderr=subprocess.DEVNULL)
        try:
            assert wait_until(lambda: _listens(port))
            yield Proxy(port, kserve, openai, triton, relay)
        finally:
            process.terminate()
            process.wait()
            relay.cut()
            kserve.close()
            openai.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def test_it_lets_through_what_is_served_and_nothing_else(proxy: Proxy) -> None:
    assert proxy.status("GET", "/v2/models/ensemble") == 200
    assert proxy.status("GET", "/v2/models/stats") == 200
    assert proxy.status("GET", "/v2/models/ensemble/versions/1/config") == 200
    assert proxy.status("GET", "/v2/health/ready") == 200
    assert proxy.status("POST", "/v2/models/ensemble/generate", body=b"{}") == 200
    assert proxy.status("GET", "/v1/models/org/name") == 200
    assert proxy.status("POST", "/v1/chat/completions", body=b"{}") == 200
    before = len(proxy.kserve.requests) + len(proxy.openai.requests)
    for method, path in (
        ("POST", "/v2/models/tokenizer/generate"),
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/systemsharedmemory/region/x/register"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/models/../../v2"),
        ("GET", "/v1/models/a/."),
        ("GET", "/v1/models//a"),
        ("GET", "//v2"),
        ("GET", "/v2%2Fmodels"),
    ):
        body = b"{}" if method == "POST" else b""
        assert proxy.status(method, path, body=body) == 404
    assert proxy.status("POST", "/v1/chat/completions", "content-encoding: gzip", body=b"x") == 415
    assert proxy.status("POST", "/v1/chat/completions", "content-length: 33554433") == 413
    assert proxy.status("POST", "/v1/chat/completions", "transfer-encoding: chunked") == 413
    assert len(proxy.kserve.requests) + len(proxy.openai.requests) == before


def test_it_serves_grpc_on_the_same_port_without_the_header_that_kills(proxy: Proxy) -> None:
    with Client(f"127.0.0.1:{proxy.port}") as client:
        assert client.generate("hello").text == "".join(PIECES)
    with grpc.insecure_channel(f"127.0.0.1:{proxy.port}") as channel:
        stub = GRPCInferenceServiceStub(channel)
        list(stub.ModelStreamInfer(iter([]), metadata=(("triton_grpc_error", "true"), ("x-kept", "1"))))
        assert "triton_grpc_error" not in proxy.triton.metadata[-1]
        assert proxy.triton.metadata[-1]["x-kept"] == "1"
        with pytest.raises(grpc.RpcError) as raised:
            stub.RepositoryIndex(pb.RepositoryIndexRequest())
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_it_waits_for_a_server_that_is_away(proxy: Proxy) -> None:
    proxy.relay.cut()
    timer = threading.Timer(1.5, proxy.relay.open)
    timer.start()
    assert proxy.status("POST", "/v1/messages", body=b"{}") == 200
    timer.join()
