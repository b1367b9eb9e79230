"""Servers on this machine are reached without the environment's proxies; others with them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from inflight.addresses import is_loopback, nearest_of, read_directly, tls_context, without_proxy_for_loopback
from inflight.client import Client, GenerateOptions, HttpClient, Retry, Timeouts
from inflight.client.http_transport import HttpTransport
from inflight.errors import InflightError
from inflight.top.poller import ServerPoller
from tests.support.fake_server import PIECES, FakeServer
from tests.support.tables import each_row

VARIABLES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")
KINDS = {"grpc": Client, "http": HttpClient}


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A proxy named by each variable that some library reads; it hangs up on whoever asks it for something."""
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in VARIABLES:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            monkeypatch.setenv(name, url)
            monkeypatch.setenv(name.upper(), url)
        listening.settimeout(20)
        yield listening


def _asked(listening: socket.socket) -> bytes:
    """Return what a client has sent to the proxy."""
    connection, _ = listening.accept()
    with connection:
        connection.settimeout(20)
        return connection.recv(1000)


@each_row("host", ["127.0.0.1", "localhost"])
@each_row("kind", KINDS)
def test_a_client_reaches_this_machine_directly(kind: str, host: str) -> None:
    with FakeServer() as fake, KINDS[kind](f"{host}:{getattr(fake, f'{kind}_port')}", retry=Retry(1)) as client:
        assert client.generate("Hi", GenerateOptions(max_tokens=5)).text == "".join(PIECES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_reaches_other_machines_by_the_proxy(kind: str, proxy: socket.socket) -> None:
    client = KINDS[kind]("inflight.invalid:18000", retry=Retry(1), timeouts=Timeouts(total=60))
    with ThreadPoolExecutor(1) as pool, client:
        asked = pool.submit(_asked, proxy)
        with pytest.raises(InflightError):
            client.generate("Hi", GenerateOptions(max_tokens=5))
        proxy.close()  # gRPC asks it again and again
        assert b"inflight.invalid:18000" in asked.result()


async def test_what_looks_at_a_server_reaches_this_machine_directly() -> None:
    with FakeServer() as fake:
        poller = ServerPoller("127.0.0.1:1", f"127.0.0.1:{fake.http_port}")
        assert "answers 400" in str((await poller.poll()).page), "the server's own answer"
        await poller.close()


def test_a_probe_reaches_this_machine_directly() -> None:
    with FakeServer() as fake, pytest.raises(OSError, match="400"):
        read_directly(f"http://127.0.0.1:{fake.http_port}/nothing")


@each_row(
    ("address", "here"),
    [
        ("localhost:8001", True),
        ("127.0.0.2", True),
        ("grpcs://[::1]:8001", True),
        ("http://0.0.0.0:8000", True),
        ("localhost.example.com:8001", False),
        ("10.0.0.1:8001", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_what_is_on_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@each_row(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("[::]", "[::1]"), ("example.com", "example.com")],
)
def test_where_a_server_is_reached(host: str, reached: str) -> None:
    assert nearest_of(host) == reached


@each_row(
    ("given", "value"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a.example, localhost"}, "a.example,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*", "NO_PROXY": "b"}, "*"),
    ],
)
def test_a_child_process_gets_the_exceptions_that_there_are_and_this_machine(given: dict[str, str], value: str) -> None:
    assert without_proxy_for_loopback(given) == {"no_proxy": value, "NO_PROXY": value}


async def test_clients_read_the_certificates_of_this_machine_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    class Client:
        def __init__(self, **settings: object) -> None:
            given.append(settings["verify"])

    monkeypatch.setattr(httpx, "AsyncClient", Client)
    for url in ("http://127.0.0.1:1", "https://example.com"):
        HttpTransport(url, "ensemble", 1)._client()
    assert given == [tls_context()] * 2
    assert given[0].verify_mode == ssl.CERT_REQUIRED
