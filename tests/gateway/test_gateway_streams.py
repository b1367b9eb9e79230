"""Streams of events and clients that leave, on real sockets: what comes, what does not, and what ends with them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.errors import DeadlineExceeded, EngineFailure, InvalidRequest, QueueFull
from inflight.gateway.app import Served
from inflight.gateway.context import Gateway
from inflight.gateway.errors import ApiError
from inflight.gateway.preparing import prepared
from inflight.gateway.sse import DONE, EventStream, event, while_connected
from tests.gateway.support.gateways import Inside, inside, rest_of, until

PENDING = 64 << 10


def _body(_: Request, gateway: Gateway, body: dict[str, Any]) -> dict[str, Any]:
    return body


class Work:
    """What the endpoints do, and what became of it."""

    def __init__(self) -> None:
        self.begun = self.closed = self.ended = 0
        self.made = 0
        self.allowed = 0
        """How many events may be made, where a request says that they are held."""

    async def events(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield ``count`` events of ``size`` bytes, ``pause_s`` apart; then fail with ``error``, where there is one."""
        self.begun += 1
        try:
            for index in range(body.get("count", 0)):
                await asyncio.sleep(body.get("pause_s", 0))
                while body.get("held") and index >= self.allowed:
                    await asyncio.sleep(0.01)
                self.made = index + 1
                yield event(json.dumps({"index": index, "text": "a" * body.get("size", 0)}))
            if error := body.get("error"):
                raise ERRORS[error]
            self.ended += 1
        finally:
            self.closed += 1

    async def stream(self, request: Request) -> Response:
        return EventStream(request, self.events(await prepared(request, _body)))

    async def whole(self, request: Request) -> Response:
        body = await prepared(request, _body)

        async def work() -> list[bytes]:
            return [one async for one in self.events(body)]

        return JSONResponse({"events": len(await while_connected(request, work()))})


ERRORS: dict[str, Exception] = {
    "invalid": InvalidRequest("temperature is -1; it must be at least 0"),
    "full": QueueFull("256 requests wait"),
    "late": DeadlineExceeded("the deadline passed"),
    "engine": EngineFailure("a detail"),
    "ours": RuntimeError("a detail"),
    "api": ApiError(404, "the model does not exist", code="model_not_found"),
}
STATUS = {"invalid": 400, "full": 503, "late": 504, "engine": 500, "ours": 500, "api": 404}


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def running(work: Work) -> Iterator[Inside]:
    routes = Served("POST", "/stream", work.stream), Served("POST", "/whole", work.whole)
    with inside(*routes, max_pending_bytes=PENDING) as served:
        yield served


@pytest.fixture
def hasty(work: Work) -> Iterator[Inside]:
    """A gateway that has little patience with its clients."""
    with inside(Served("POST", "/stream", work.stream), max_pending_bytes=PENDING, client_timeout_s=2) as served:
        yield served


def _connect(
    running: Inside, path: str, body: dict[str, Any], receive_bytes: int = 0, version: str = "1.1"
) -> socket.socket:
    """Send a request and return its connection; ``receive_bytes``: of its buffer; ``version``: of HTTP."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", running.port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def test_events_come_as_they_are_made(running: Inside, work: Work) -> None:
    """Each is made when the one before has come."""
    work.allowed = 1
    with running.client() as client, client.stream("POST", "/stream", json={"count": 4, "held": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        lines = []
        for line in filter(None, reply.iter_lines()):
            lines.append(line)
            work.allowed += 1
    assert [json.loads(line.removeprefix("data: "))["index"] for line in lines[:-1]] == [0, 1, 2, 3]
    assert lines[-1] == "data: [DONE]"


def test_a_client_of_http_1_0_gets_a_stream_that_ends_with_the_connection(running: Inside) -> None:
    with _connect(running, "/stream", {"count": 2}, version="1.0") as connection:
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = ['data: {"index": 0, "text": ""}', 'data: {"index": 1, "text": ""}', "data: [DONE]", ""]
    assert body.decode().split("\n\n") == events


def test_a_client_of_http_1_0_gets_the_length_of_a_whole_answer(running: Inside) -> None:
    with _connect(running, "/whole", {"count": 2}, version="1.0") as connection:
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head.lower()
    assert json.loads(body) == {"events": 2}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_before_the_first_event_has_its_status(running: Inside, error: str) -> None:
    with running.client() as client:
        reply = client.post("/stream", json={"error": error})
    assert reply.status_code == STATUS[error]
    assert "a detail" not in reply.text
    assert (reply.headers.get("x-should-retry") == "false") == (error == "late")
    assert ("retry-after" in reply.headers) == (error == "full")


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_within_a_stream_is_its_last_event(running: Inside, error: str) -> None:
    with running.client() as client:
        reply = client.post("/stream", json={"count": 2, "error": error})
    assert reply.status_code == 200
    assert DONE.decode() not in reply.text
    last = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))
    assert set(last) == {"error"}
    assert "a detail" not in reply.text


@pytest.mark.parametrize("path", ["/stream", "/whole"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_the_work_ends_with_its_client(running: Inside, work: Work, path: str, how: str) -> None:
    connection = _connect(running, path, {"count": 10_000, "pause_s": 0.01})
    until(lambda: work.made > 5)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    until(lambda: work.closed == 1)  # by itself it would end after 100 s
    assert work.ended == 0
    until(lambda: running.gateway.load.running == 0)
    with running.client() as client:
        page = client.get("/metrics").text
    assert f'inflight_gateway_disconnects_total{{route="{path}"}} 1.0' in page


def test_the_work_ends_with_a_client_that_leaves_before_the_first_event(running: Inside, work: Work) -> None:
    connection = _connect(running, "/stream", {"count": 1, "pause_s": 60})
    until(lambda: work.begun == 1)
    connection.close()
    until(lambda: work.closed == 1)


def _indexes(connection: socket.socket) -> list[int]:
    """Read a stream to its end; return the events' indexes."""
    answer = bytearray()
    while DONE not in answer[-100:] and (more := connection.recv(PENDING)):
        answer += more
    connection.close()
    return [int(index) for index in re.findall(b'"index": ([0-9]+),', answer)]


def test_a_client_that_is_behind_is_served_whole(running: Inside, work: Work) -> None:
    """Nothing is lost of what waits, and the work does not wait for the client."""
    connection = _connect(running, "/stream", {"count": 200, "size": 200}, receive_bytes=4096)
    until(lambda: work.ended == 1)
    assert _indexes(connection) == list(range(200))


def test_nothing_is_lost_while_the_sockets_are_full(running: Inside, work: Work) -> None:
    connection = _connect(running, "/stream", {"count": 1000, "size": PENDING // 4}, receive_bytes=4096)

    def stands_still() -> bool:
        made = work.made
        time.sleep(0.1)
        return work.made == made > 0

    until(stands_still)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    assert _indexes(connection) == list(range(1000))


def test_a_client_that_does_not_read_is_disconnected(hasty: Inside, work: Work) -> None:
    """What waits for it is bounded: by the pending bytes, and as many in the socket's buffers and uvicorn's."""
    connection = _connect(hasty, "/stream", {"count": 100_000, "size": 1000}, receive_bytes=4096)
    until(lambda: work.closed == 1)
    assert work.made * 1000 < 50 * PENDING, "the kernel's buffers are a few MB"
    assert work.ended == 0
    until(lambda: hasty.gateway.load.running == 0)
    with hasty.client() as client:
        assert 'inflight_gateway_slow_clients_total{route="/stream"} 1.0' in client.get("/metrics").text
    assert not rest_of(connection).endswith(b"0\r\n\r\n"), "it can see that this is not the end"
    connection.close()


def test_a_client_that_reads_gets_events_of_any_size(running: Inside, work: Work) -> None:
    with running.client() as client:
        text = client.post("/stream", json={"count": 20, "size": 5 * PENDING}).text
    assert text.endswith(DONE.decode())
    assert [json.loads(one[6:])["index"] for one in text.split("\n\n")[:20]] == list(range(20))
    assert work.ended == 1


@pytest.mark.proof
def test_a_client_that_stops_reading_a_slow_stream_is_disconnected_in_time(hasty: Inside, work: Work) -> None:
    """It never has much to take; but it takes nothing, for longer than ``client_timeout_s``."""
    connection = _connect(hasty, "/stream", {"count": 100_000, "size": 60_000, "pause_s": 0.2}, receive_bytes=4096)
    until(lambda: work.closed == 1)
    assert work.ended == 0
    connection.close()


def test_silent_streams_get_comments_where_they_are_wanted(work: Work) -> None:
    stream = Served("POST", "/stream", work.stream)
    lines = []
    with (
        inside(stream, stream_keep_alive_s=0.05) as running,
        running.client() as client,
        client.stream("POST", "/stream", json={"count": 2, "held": True}) as reply,
    ):
        for line in reply.iter_lines():
            lines.append(line)
            work.allowed = lines.count(": keep-alive") // 4
    with inside(stream, stream_keep_alive_s=600) as running, running.client() as client:
        late = client.post("/stream", json={"count": 0, "error": "full"})
    assert lines[:8] == [": keep-alive", ""] * 4
    assert lines[-2:] == ["data: [DONE]", ""]
    said = [line for line in lines if line not in (": keep-alive", "", "data: [DONE]")]
    assert [json.loads(line.removeprefix("data: "))["index"] for line in said] == [0, 1]
    assert late.status_code == 503, "an error before the first comment has its status still"


@pytest.mark.proof
def test_many_streams_leave_nothing_behind(running: Inside, work: Work) -> None:
    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
            replies = await asyncio.gather(*(client.post("/stream", json={"count": 20}) for _ in range(50)))
        return [reply.text for reply in replies]

    texts = asyncio.run(ask())
    assert {text.count("data: ") for text in texts} == {21}
    until(lambda: (work.begun, work.closed, work.ended) == (50, 50, 50))
    until(lambda: running.gateway.load.running == 0)
