"""What a client may take of the gateway: bytes, time, places. Client libraries are too polite for most of it."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway import load as load_module
from inflight.gateway.app import Served
from inflight.gateway.errors import ApiError
from inflight.gateway.load import Load
from inflight.gateway.protocol import MOST_HEAD_BYTES
from inflight.gateway.sse import EventStream, event
from tests.gateway.support.gateways import Held, Inside, drips, inside, rest_of, until

LIMIT = 4096
PATIENCE_S = 30
JSON = "content-type: application/json"


async def _tick(request: Request) -> Response:
    """Stream an event each hundredth of a second, without end."""

    async def events() -> AsyncIterator[bytes]:
        for index in itertools.count():
            yield event(str(index))
            await asyncio.sleep(0.01)

    return EventStream(request, events())


async def _sleep(request: Request) -> Response:
    """Answer after as many seconds as the path says."""
    await asyncio.sleep(float(request.path_params["seconds"]))
    return JSONResponse({})


SLEEP = Served("GET", "/sleep/{seconds}", _sleep)


@pytest.fixture(scope="module")
def small() -> Iterator[Inside]:
    """A gateway with small limits."""
    with inside(SLEEP, max_body_bytes=LIMIT, client_timeout_s=PATIENCE_S, max_concurrent_requests=2) as running:
        yield running


def _connect(running: Inside) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), 60)


def _ask(running: Inside, *parts: bytes) -> bytes:
    """Send parts of a request and return all that comes until the connection ends, which it must."""
    with _connect(running) as connection:
        with suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        return rest_of(connection)


def _post(*headers: str, path: str = "/tokenize") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", "connection: close", JSON, *headers, "", ""]).encode()


def _code(answer: bytes) -> tuple[int, str]:
    """Return the status and the error's code of one answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
def test_a_body_is_bounded_by_what_it_says(small: Inside, size: int) -> None:
    body = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
    with small.client() as client:
        reply = client.post("/tokenize", content=body, headers={"content-type": "application/json"})
        assert len(body) == size
        assert reply.status_code == (200 if size == LIMIT else 413)
        assert client.get("/v1/models").status_code == 200, "the connection is of use further on"


def test_a_body_is_bounded_while_it_comes(small: Inside) -> None:
    chunks = [b"400\r\n" + b"a" * 1024 + b"\r\n"] * 5
    assert _code(_ask(small, _post("transfer-encoding: chunked"), *chunks)) == (413, "request_too_large")


def test_a_body_that_is_refused_is_not_kept(small: Inside) -> None:
    """A client that sends before it reads gets its answer, and not a broken connection."""
    with small.client() as client:
        reply = client.post("/tokenize", content=b"a" * (8 << 20), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("length", ["-1", "1e3", "+5", "9" * 30, "5, 6"])
def test_an_odd_length_is_refused(small: Inside, length: str) -> None:
    assert _code(_ask(small, _post(f"content-length: {length}"), b"{}"))[0] in (400, 413)


def test_a_length_beside_chunks_is_refused(small: Inside) -> None:
    """A proxy in front might believe the other one (request smuggling)."""
    answer = _ask(small, _post("content-length: 2", "transfer-encoding: chunked"), b"0\r\n\r\n")
    assert _code(answer)[0] == 400


def test_a_body_that_does_not_come_ends_in_time(small: Inside) -> None:
    with _connect(small) as connection:
        connection.sendall(_post("content-length: 100") + b'{"prompt"')
        until(lambda: small.gateway.load.running == 1)
        small.advance(0.6 * PATIENCE_S)
        assert small.gateway.load.running == 1
        small.advance(0.6 * PATIENCE_S)
        assert _code(rest_of(connection)) == (408, "request_timeout")


@pytest.mark.parametrize("first", [b"", b"GET /v1/models HTTP/1.1\r\n", b"GET"])
def test_a_head_that_does_not_come_ends_in_time(small: Inside, first: bytes) -> None:
    others = _open(small)
    with _connect(small) as connection:
        until(lambda: _open(small) - others)
        small.advance(0.6 * PATIENCE_S)
        connection.sendall(first)
        small.advance(0)
        assert _open(small) - others
        small.advance(0.6 * PATIENCE_S)
        assert rest_of(connection) == b""


def _open(running: Inside) -> set[Any]:
    """Return the connections that are open, without those that end meanwhile."""
    return set(running.server.server_state.connections)


def test_a_head_that_drips_ends_in_time(small: Inside) -> None:
    with _connect(small) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert drips(small, connection, b"x-a: b\r\n", 10 * PATIENCE_S) < 2 * PATIENCE_S
        assert rest_of(connection) == b""


@pytest.mark.parametrize("line", [b"x-a: %s\r\n", b"x-%s: a\r\n"])
def test_a_head_is_bounded(small: Inside, line: bytes) -> None:
    answer = _ask(small, b"GET / HTTP/1.1\r\nhost: x\r\n" + line % (b"a" * MOST_HEAD_BYTES))
    assert _code(answer) == (431, "headers_too_large")


def test_a_whole_head_is_bounded_that_comes_in_one_read(small: Inside) -> None:
    line = b"x-a: %s\r\n" % (b"a" * (MOST_HEAD_BYTES // 4))
    for lines, status in ((3, 404), (5, 431)):
        assert (
            _code(_ask(small, b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + line * lines + b"\r\n"))[0]
            == status
        )


def test_many_headers_are_bounded_too(small: Inside) -> None:
    answer = _ask(small, b"GET / HTTP/1.1\r\nhost: x\r\n", *[b"x-a: b\r\n" * 1000] * 10)
    assert _code(answer) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n\r\nNO HTTP\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT x:443 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_in_openais_shape(small: Inside, sent: bytes) -> None:
    assert _code(_ask(small, sent)) == (400, "invalid_request_error")


def test_no_more_requests_than_allowed_run_at_once() -> None:
    held = Held()
    with inside(held.route, max_concurrent_requests=2) as running, running.client() as client:
        with ThreadPoolExecutor() as pool:
            others = [pool.submit(client.get, "/held") for _ in range(2)]
            until(lambda: running.gateway.load.running == 2)
            refused = client.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_requests")
            assert refused.headers["retry-after"] == "1"
            assert client.get("/metrics").status_code == 200
            held.free.set()
        assert [one.result().status_code for one in others] == [200, 200]
        until(lambda: running.gateway.load.running == 0)  # the last one is counted out after its answer
        assert client.get("/v1/models").status_code == 200


def test_who_finds_no_place_is_told_when_there_will_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    # The module's own name alone: the event loop of the gateway beside it reads the clock too.
    monkeypatch.setattr(load_module, "time", SimpleNamespace(monotonic=lambda: now))
    load = Load(2)
    for _ in range(200):
        with load.one_more():
            now += 9
    with load.one_more(), load.one_more(), pytest.raises(ApiError) as refused, load.one_more():
        pass
    assert refused.value.headers["retry-after"] == "5"


def test_a_pipelined_request_waits_for_another_connection(small: Inside) -> None:
    """It is not answered, and the connection ends: else nobody would see the first one's client leave."""
    get = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = _ask(small, get % b"/sleep/0.3" + get % b"/v1/models", get % b"/v1/models")
    assert len(re.findall(rb"HTTP/1.1 200", answer)) == 1
    assert b"connection: close" in answer


def test_requests_one_after_another_share_a_connection(small: Inside) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=60)
    with closing(connection):
        connection.connect()
        own = connection.sock
        for _ in range(3):
            connection.request("GET", "/v1/models")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.read()
            assert connection.sock is own


def test_what_runs_at_the_end_is_finished_and_what_is_new_refused() -> None:
    held = Held()
    with inside(held.route, exit_timeout_s=120) as running, running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(client.get, "/held")
        until(lambda: running.gateway.load.running == 1)
        running.loop.call_soon_threadsafe(running.server.drain)
        until(lambda: running.gateway.load.draining)
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health").status_code == 503
        assert not running.server.should_exit
        held.free.set()
        assert reply.result().status_code == 200
        until(lambda: running.server.should_exit)


def test_what_does_not_end_in_time_is_told_so() -> None:
    with inside(SLEEP, exit_timeout_s=1) as running, running.client() as client, ThreadPoolExecutor() as pool:
        reply = pool.submit(client.get, "/sleep/600")
        until(lambda: running.gateway.load.running == 1)
        running.loop.call_soon_threadsafe(running.server.drain)
        assert reply.result().status_code == 503


def test_a_stream_that_does_not_end_in_time_is_told_so() -> None:
    tick, lines = Served("GET", "/tick", _tick), list[str]()

    def read() -> None:
        with client.stream("GET", "/tick") as answer:
            for line in answer.iter_lines():
                lines.append(line)

    with inside(tick, exit_timeout_s=1) as running, running.client() as client, ThreadPoolExecutor() as pool:
        reading = pool.submit(read)
        until(lambda: len(lines) > 10)
        running.loop.call_soon_threadsafe(running.server.drain)
        reading.result()
    *events, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert events == list(range(len(events)))
    assert last["error"]["message"] == "the server is stopping"
