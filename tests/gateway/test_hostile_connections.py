"""What a client may do to a connection beside requests: bytes that belong to none, drips, answers left unread."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway import middleware
from inflight.gateway.app import Served
from inflight.gateway.middleware import MOST_BODIES, SMALL_BODY
from inflight.gateway.protocol import _Head
from tests.gateway.support.gateways import Held, Inside, drips, inside, rest_of, until
from tests.gateway.test_limits import SLEEP

PATIENCE_S = 30
BIG = 32 << 20
"""Bytes of an answer: more than the kernel's buffers take."""


async def _big(request: Request) -> Response:
    """Answer with much."""
    return Response(b"a" * BIG)


LARGE = Served("GET", "/big", _big)


@pytest.fixture(scope="module")
def small() -> Iterator[Inside]:
    """A gateway that takes small bodies."""
    with inside(SLEEP, LARGE, client_timeout_s=PATIENCE_S, max_body_bytes=4096) as running:
        yield running


def _connect(running: Inside) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # otherwise the kernel makes it larger
    connection.settimeout(60)
    connection.connect(("127.0.0.1", running.port))
    return connection


def _answer(connection: socket.socket) -> bytes:
    """Return one answer, which says its length; the connection goes on. It is shorter where the connection ends."""
    head = b""
    while b"\r\n\r\n" not in head and (more := connection.recv(1 << 16)):
        head += more
    length = re.search(rb"content-length: (\d+)\r\n", head)
    missing = int(length[1]) - len(head.partition(b"\r\n\r\n")[2]) if length else 0
    parts = [head]
    with suppress(ConnectionError):
        while missing > 0 and (more := connection.recv(1 << 20)):
            parts.append(more)
            missing -= len(more)
    return b"".join(parts)


def _send(connection: socket.socket, *parts: bytes) -> None:
    """Send parts, as far as the server takes them."""
    with suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)


def _get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def _post(*headers: str) -> bytes:
    lines = ["POST /tokenize HTTP/1.1", "host: x", "content-type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode()


def _status(answer: bytes) -> int:
    return int(answer.split()[1])


@pytest.mark.parametrize(
    "behind",
    [
        [b"0\r\n", *[b"x-a: " + b"a" * 1000 + b"\r\n"] * 500],
        [b"0\r\nx-a: ", *[b"a" * 1000] * 500],
        [b"2;", *[b"a" * 1000] * 500],
    ],
    ids=["trailers", "a long trailer", "an extension of a chunk"],
)
def test_what_is_beside_a_body_in_chunks_is_bounded(small: Inside, behind: list[bytes]) -> None:
    with closing(_connect(small)) as connection:
        _send(connection, _post("transfer-encoding: chunked"), b"2\r\n{}\r\n", *behind)
        answer = rest_of(connection)
    assert _status(answer) == 431
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"
    until(lambda: small.gateway.load.running == 0)


def test_a_few_trailers_are_read_and_forgotten(alone: Inside) -> None:
    body = b'{"prompt": "a"}'
    chunks = b"%x\r\n%b\r\n0\r\nconnection: close\r\nx-request-id: \xff\r\n\r\n" % (len(body), body)
    with closing(_connect(alone)) as connection:
        _send(connection, _post("transfer-encoding: chunked"), chunks)
        answer = _answer(connection)
    assert _status(answer) == 200
    assert b"connection: close" not in answer


@pytest.mark.parametrize("stray", [b"\r\n", b"\r\n\r\n\r\n", b"x", b"}}}}\r\n\r\n"])
def test_what_comes_behind_a_request_does_not_cut_its_answer(small: Inside, stray: bytes) -> None:
    with closing(_connect(small)) as connection:
        _send(connection, _get("/v1/models"))
        assert _status(_answer(connection)) == 200
        _send(connection, stray)
        small.advance(0)
        _send(connection, _get(f"/sleep/{2 * PATIENCE_S}", "connection: close"))
        if stray.isspace():
            until(lambda: small.gateway.load.running == 1)
        small.advance(2 * PATIENCE_S)
        assert _status(rest_of(connection)) == (200 if stray.isspace() else 400)


@pytest.mark.parametrize("stray", [b"\r\n", b"x"])
def test_what_comes_before_the_answer_does_not_cut_it(small: Inside, stray: bytes) -> None:
    with closing(_connect(small)) as connection:
        _send(connection, _get(f"/sleep/{2 * PATIENCE_S}"))
        until(lambda: small.gateway.load.running == 1)
        _send(connection, stray)
        small.advance(0)
        small.advance(2 * PATIENCE_S)
        assert _status(_answer(connection)) == 200


def test_a_body_that_drips_ends_in_time(small: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "time", SimpleNamespace(monotonic=lambda: small.loop.time()))
    with closing(_connect(small)) as connection:
        _send(connection, _post("content-length: 1000"))
        until(lambda: small.gateway.load.running == 1)
        assert drips(small, connection, b" ", 10 * PATIENCE_S) < 2 * PATIENCE_S
        assert _status(rest_of(connection)) == 408


def test_the_rest_of_a_body_that_was_refused_may_not_drip(small: Inside) -> None:
    with closing(_connect(small)) as connection:
        _send(connection, _post("content-length: 5000"))
        assert drips(small, connection, b" ", 10 * PATIENCE_S) < 2 * PATIENCE_S
        assert _status(rest_of(connection)) == 413


def test_an_answer_has_its_own_time_to_be_taken() -> None:
    """The time of the answer before it on the connection is over meanwhile."""
    answers = 0

    async def big(request: Request) -> Response:
        nonlocal answers
        answers += 1
        return await _big(request)

    route = Served("GET", "/big", big)
    with inside(route, client_timeout_s=PATIENCE_S) as running, closing(_connect(running)) as connection:
        for _ in range(2):
            before = answers
            _send(connection, _get("/big"))
            until(lambda before=before: answers > before)
            until(lambda: running.gateway.load.running == 0)
            running.advance(0.6 * PATIENCE_S)
            assert len(_answer(connection)) > BIG


def test_an_unread_answer_does_not_keep_the_place_of_the_next(small: Inside) -> None:
    with closing(_connect(small)) as connection:
        _send(connection, _get("/big"))
        assert connection.recv(1)
        until(lambda: small.gateway.load.running == 0)
        _send(connection, _get("/v1/models"))
        until(lambda: small.gateway.load.running == 1)
        small.advance(PATIENCE_S)
        until(lambda: small.gateway.load.running == 0)
        assert len(rest_of(connection)) < BIG


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0"])
def test_a_request_that_offers_another_protocol_is_served_in_this_one(alone: Inside, upgrade: str) -> None:
    """Java's client offers HTTP/2 with each request."""
    body = b'{"prompt": "a"}'
    offer = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk"
    with closing(_connect(alone)) as connection:
        for _ in range(2):
            _send(connection, _post(offer, f"content-length: {len(body)}"), body)
            assert _status(_answer(connection)) == 200
        _send(connection, _get("/v1/models", offer, "connection: close"))
        assert _status(rest_of(connection)) == 200


@pytest.mark.parametrize("pieces", [[b"\r\n"], [b"\r\n\r\n"], [b"\n\n"], [b"\r", b"\n", b"\r\n", b""]])
def test_empty_lines_before_a_head_do_not_hide_its_offer(alone: Inside, pieces: list[bytes]) -> None:
    body = b'{"prompt": "a"}'
    head = _post("connection: Upgrade", "upgrade: h2c", f"content-length: {len(body)}")
    *first, last = pieces
    with closing(_connect(alone)) as connection:
        for _ in range(2):
            _send(connection, *first, last + head + body)
            assert _status(_answer(connection)) == 200


def test_empty_lines_before_a_head_are_bounded(alone: Inside) -> None:
    with closing(_connect(alone)) as connection:
        _send(connection, *[b"\r\n" * 1024] * 40)
        assert _status(rest_of(connection)) == 431


@pytest.mark.parametrize(("version", "answers"), [("1.0", [200]), ("1.1", [100, 200])])
def test_only_a_client_that_knows_it_is_told_to_continue(alone: Inside, version: str, answers: list[int]) -> None:
    body = b'{"prompt": "a"}'
    head = _post("expect: 100-continue", "connection: close", f"content-length: {len(body)}")
    with closing(_connect(alone)) as connection:
        _send(connection, head.replace(b"HTTP/1.1", f"HTTP/{version}".encode()), body)
        assert [int(code) for code in re.findall(rb"^HTTP/1.1 (\d+)", rest_of(connection), re.M)] == answers


@given(data=st.data())
def test_a_head_loses_its_offer_wherever_it_is_cut(data: st.DataObject) -> None:
    lines = data.draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n", b"\n"]))
    head = lines + b"POST /upgrade: HTTP/1.1\r\nUpGrade: h2c\r\nupgrades: a\r\nx: a\r\n upgrade: b\r\nupgrade:c\r\n\r\n"
    body = b"\nupgrade: of the body\r\n\r\n\nupgrade:"
    whole = head + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[one:other] for one, other in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    taken, passed, come = _Head(), b"", 0
    for piece in pieces:
        passed += taken.take(piece) if come < len(head) else piece  # the protocol hands on what comes behind a head
        come += len(piece)
    refused = head.lstrip().replace(b"UpGrade:", b"refused-upgrade:").replace(b"\nupgrade:c", b"\nrefused-upgrade:c")
    assert passed == refused + body
    assert taken.size == len(head)


def test_the_connection_that_is_idle_for_longest_makes_room_for_another() -> None:
    held = Held()
    with inside(held.route, most_connections=3) as running, closing(_connect(running)) as busy:
        _send(busy, _get("/held", "connection: close"))
        until(lambda: running.gateway.load.running == 1)
        others = [_connect(running) for _ in range(20)]
        assert [rest_of(one) for one in others[:-2]] == [b""] * 18
        for one in others[-2:]:
            _send(one, _get("/v1/models", "connection: close"))
            assert _status(rest_of(one)) == 200
            one.close()
        held.free.set()
        assert _status(rest_of(busy)) == 200


def test_a_connection_whose_answer_is_still_read_is_not_idle() -> None:
    big = Served("GET", "/big", _big)
    with inside(big, most_connections=3) as running, closing(_connect(running)) as reader:
        _send(reader, _get("/big", "connection: keep-alive"))
        assert reader.recv(1)
        until(lambda: running.gateway.load.running == 0)  # the answer is made, and waits for its client
        others = [_connect(running) for _ in range(20)]
        assert [rest_of(one) for one in others[:-2]] == [b""] * 18
        assert len(_answer(reader)) >= BIG
        for one in others:
            one.close()


async def _hold(request: Request) -> Response:
    """Take a body and answer once the client has left."""
    await request.body()
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
    return Response()


MOST = 256 << 10
FULL = MOST_BODIES * MOST // (MOST - SMALL_BODY) + 1
"""So many bodies of ``MOST`` bytes are more than there may be."""


@pytest.fixture
def roomy() -> Iterator[Inside]:
    """A gateway that takes all bodies together as 16 of 256 KiB."""
    with inside(Served("POST", "/tokenize/hold", _hold), max_body_bytes=MOST) as running:
        yield running


def test_bodies_that_do_not_end_make_room_for_others(roomy: Inside) -> None:
    waiting = [_connect(roomy) for _ in range(FULL + 10)]
    for one in waiting:
        _send(one, _post(f"content-length: {MOST}", "connection: close"), b" " * (MOST - 1))
    prompt = "a" * (MOST - 100)
    with roomy.client() as client:
        # Those that wait become slower with each second; only where the machine stands still is another body slower.
        until(lambda: client.post("/tokenize", json={"prompt": prompt}).status_code == 200)
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
    answers = [rest_of(one) for one in waiting[:2]]
    for one in waiting:
        one.close()
    for answer in answers:
        assert _status(answer) == 503
        assert b"retry-after: 1" in answer
        assert b"gateway.max_body_bytes" in answer
        assert b"this one came the slowest" in answer
    until(lambda: roomy.gateway.load.running == 0)


def test_small_bodies_pass_where_large_ones_do_not(roomy: Inside) -> None:
    """The bodies of requests that run are whole, and stay."""
    held = [_connect(roomy) for _ in range(FULL - 1)]
    for number, one in enumerate(held, 1):
        _send(one, _post(f"content-length: {MOST}").replace(b"/tokenize", b"/tokenize/hold"), b" " * MOST)
        until(lambda number=number: roomy.gateway.load.running == number)
    with roomy.client() as client:
        until(lambda: client.post("/tokenize", json={"prompt": "a" * (MOST - 100)}).status_code == 503)
        assert client.post("/tokenize", json={"prompt": "a" * (SMALL_BODY - 100)}).status_code == 200
        for one in held:
            one.close()
        until(lambda: roomy.gateway.load.running == 0)
        assert client.post("/tokenize", json={"prompt": "a" * (MOST - 100)}).status_code == 200


def test_a_body_in_many_parts_is_read_whole(roomy: Inside) -> None:
    body = json.dumps({"prompt": "a" * 1000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"
    parts = [chunks[place : place + 7] for place in range(0, len(chunks), 7)]
    with closing(_connect(roomy)) as connection:
        _send(connection, _post("transfer-encoding: chunked", "connection: close"), *parts)
        answer = rest_of(connection)
    with roomy.client() as client:
        assert json.loads(answer.partition(b"\r\n\r\n")[2]) == client.post("/tokenize", json=json.loads(body)).json()
