"""Why a server cannot be asked: what is at the other end, found out and told in one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from inflight.client import Client, HttpClient
from inflight.client.errors import ServerLoading, ServerUnreachable
from inflight.client.transport import parse_address
from inflight.errors import InvalidRequest, NotFound
from tests.support.fake_server import FakeServer


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def problem(url: str, model: str = "ensemble") -> Exception | None:
    kind = HttpClient if url.startswith("http") else Client
    with kind(url, model=model, connect_timeout=2) as client:
        return client.problem()


@contextmanager
def page(text: bytes) -> Iterator[int]:
    """Serve a page at every path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def listener() -> Iterator[int]:
    """Take connections and hang up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_none_where_the_model_is_ready(fake: FakeServer) -> None:
    assert problem(f"127.0.0.1:{fake.grpc_port}") is None
    assert problem(f"http://127.0.0.1:{fake.http_port}") is None


@pytest.mark.parametrize("http", [False, True])
def test_loading_and_models_that_are_not_there(fake: FakeServer, http: bool) -> None:
    url = f"http://127.0.0.1:{fake.http_port}" if http else f"127.0.0.1:{fake.grpc_port}"
    missing = problem(url, "assemble")
    assert isinstance(missing, NotFound)
    assert str(missing) == f"the server at {url} has no model 'assemble' that is ready; name another with --model"
    fake.ready = False
    loading = problem(url)
    assert isinstance(loading, ServerLoading)
    assert str(loading) == f"the server at {url} is not ready yet: it is loading its models or stopping"
    threading.Timer(0.3, lambda: setattr(fake, "ready", True)).start()
    with (HttpClient if http else Client)(url) as client:
        client.check(loading_s=20)


def test_ports_that_were_confused(fake: FakeServer) -> None:
    grpc, http = f"127.0.0.1:{fake.grpc_port}", f"127.0.0.1:{fake.http_port}"
    assert str(problem(http)) == (
        f"{http} is the server's HTTP port; gRPC is probably at --url 127.0.0.1:{fake.http_port + 1}, "
        f"and --url http://{http} asks over HTTP"
    )
    assert str(problem(f"http://{grpc}")) == (
        f"{grpc} is the server's gRPC port; HTTP is probably at --url http://127.0.0.1:{fake.grpc_port - 1}, "
        f"and --url {grpc} asks over gRPC"
    )
    assert str(problem(f"https://{http}")) == f"{http} does not use TLS: --url http://{http}"
    assert str(problem(f"grpcs://{grpc}")) == f"{grpc} does not use TLS: --url {grpc}"


@pytest.mark.parametrize(("scheme", "step"), [("", 1), ("http://", 2)])
def test_the_metrics_port(scheme: str, step: int) -> None:
    with page(b"# HELP nv_inference_count\n") as port:
        there = f"{scheme}127.0.0.1:{port - step}"
        said = f"127.0.0.1:{port} is the server's metrics port; requests probably go to --url {there}"
        assert str(problem(f"{scheme}127.0.0.1:{port}")) == said


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_what_is_no_server_of_ours(scheme: str) -> None:
    with listener() as port:
        assert str(problem(f"{scheme}127.0.0.1:{port}")).startswith(
            f"what listens at 127.0.0.1:{port} is not a Triton server; start"
        )


def test_names_that_are_not_known() -> None:
    error = problem("nobody.invalid:8001")
    assert isinstance(error, ServerUnreachable)
    assert str(error).startswith("no server answers at nobody.invalid:8001 (")
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "ftp://localhost:1",
        "localhost:port",
        "",
        ":8001",
        "localhost:8001/v2",
        "me@localhost:8001",
        "a..b:8001",
        f"{64 * 'a'}:8001",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InvalidRequest, match="^--url is "):
        parse_address(url)


def test_addresses() -> None:
    assert parse_address("[::1]:8001").url == "[::1]:8001"
    assert parse_address("https://llm.example.com").place == "llm.example.com:443"
    assert parse_address("localhost:8000", default="http").url == "http://localhost:8000"
    assert parse_address("HTTPS://me@llm.example.com/triton").url == "https://llm.example.com:443"
