"""What a client may take of the gateway: bytes, time, places. Client libraries are too polite for most of it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway import load as load_module
from inflight.gateway.app import Served
from inflight.gateway.errors import ApiError
from inflight.gateway.load import Load
from inflight.gateway.protocol import MOST_HEAD_BYTES
from inflight.gateway.sse import EventStream, event
from tests.gateway.support.gateways import Inside, inside, until

LIMIT = 4096
PATIENCE_S = 0.5
JSON = "content-type: application/json"


async def _tick(request: Request) -> Response:
    """Stream an event each tenth of a second, for a minute."""

    async def events() -> AsyncIterator[bytes]:
        for index in range(600):
            yield event(str(index))
            await asyncio.sleep(0.1)

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


def _ask(running: Inside, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts of a request and return all that comes until the connection ends, which it must."""
    with socket.create_connection(("127.0.0.1", running.port), 60) as connection:
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(pause_s)
        except ConnectionError:
            pass
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            pass
        return answer


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
    began = time.monotonic()
    answer = _ask(small, _post("content-length: 100"), b'{"prompt"')
    assert _code(answer) == (408, "request_timeout")
    assert time.monotonic() - began >= PATIENCE_S


@pytest.mark.parametrize("first", [b"", b"GET /v1/models HTTP/1.1\r\n", b"GET"])
def test_a_head_that_does_not_come_ends_in_time(small: Inside, first: bytes) -> None:
    began = time.monotonic()
    assert _ask(small, first) == b""
    assert time.monotonic() - began >= PATIENCE_S


def test_a_head_that_drips_ends_in_time(small: Inside) -> None:
    began = time.monotonic()
    assert _ask(small, *[b"GET / HTTP/1.1\r\n", *[b"x-a: b\r\n"] * 600], pause_s=0.1) == b""
    assert time.monotonic() - began < 50, "it takes a minute"


@pytest.mark.parametrize("line", [b"x-a: %s\r\n", b"x-%s: a\r\n"])
def test_a_head_is_bounded(small: Inside, line: bytes) -> None:
    answer = _ask(small, b"GET / HTTP/1.1\r\nhost: x\r\n" + line % (b"a" * MOST_HEAD_BYTES))
    assert _code(answer) == (431, "headers_too_large")


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


def test_no_more_requests_than_allowed_run_at_once(small: Inside) -> None:
    with small.client() as client:
        others = [threading.Thread(target=client.get, args=("/sleep/1",)) for _ in range(2)]
        for one in others:
            one.start()
        until(lambda: small.gateway.load.running == 2)
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert client.get("/metrics").status_code == 200
        for one in others:
            one.join()
        assert client.get("/v1/models").status_code == 200
    until(lambda: small.gateway.load.running == 0)  # the last one is counted out after its answer


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
    get = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    last = get.replace(b"host: x", b"host: x\r\nconnection: close")
    answer = _ask(small, get, get, last, pause_s=0.1)
    assert len(re.findall(rb"HTTP/1.1 200", answer)) == 3


def test_what_runs_at_the_end_is_finished_and_what_is_new_refused() -> None:
    with inside(SLEEP) as running, running.client() as client:
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(client.get("/sleep/1")))
        thread.start()
        until(lambda: running.gateway.load.running == 1)
        _in_loop(running)
        until(lambda: running.gateway.load.draining)
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health").status_code == 503
        thread.join()
        until(lambda: not running.server.started or running.server.should_exit)
    assert [reply.status_code for reply in replies] == [200]


def test_what_does_not_end_in_time_is_told_so() -> None:
    with inside(SLEEP, exit_timeout_s=1) as running, running.client() as client:
        replies: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: replies.append(client.get("/sleep/60")))
        thread.start()
        until(lambda: running.gateway.load.running == 1)
        _in_loop(running)
        thread.join(10)
    assert [reply.status_code for reply in replies] == [503]


def test_a_stream_that_does_not_end_in_time_is_told_so() -> None:
    with inside(Served("GET", "/tick", _tick), exit_timeout_s=5) as running, running.client() as client:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(client.get("/tick").text))
        thread.start()
        until(lambda: running.gateway.load.running == 1)
        _in_loop(running)
        thread.join(60)
    [text] = texts
    *events, last = text.strip().split("\n\n")
    assert [json.loads(one.removeprefix("data: ")) for one in events] == list(range(len(events)))
    assert len(events) > 5
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the server is stopping"


def _in_loop(running: Inside) -> None:
    """Have the server drain, as SIGTERM does."""
    task = running.gateway.readiness._task
    assert task is not None
    task.get_loop().call_soon_threadsafe(running.server.drain)
