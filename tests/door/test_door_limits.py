"""What a client may send the door, and how slowly."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from inflight.serve.envoy.admin import ask
from inflight.serve.envoy.files import ADMIN_SOCKET
from tests.door.support.doors import Door, door, read_answer
from tests.support.waiting import wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_bodies_are_bounded_whether_they_say_their_length_or_not(plain: Door) -> None:
    """``plain`` takes 100,000 bytes."""
    before = len(plain.http.requests)
    kserve = plain.ask("POST", "/v2/models/ensemble/generate", body=b"x" * 100_001)
    assert (kserve.status, kserve.json) == (413, {"error": "the request's body is too large"})
    chunk = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
    head = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        assert plain.send(head + 30 * chunk).status in (413, 0)
    assert len(plain.http.requests) == before
    full = b'{"a": "' + b"x" * 99_900 + b'"}'  # and the client's name, which the door adds
    assert plain.ask("POST", "/v2/models/ensemble/generate", body=full).status == 200


def test_a_request_that_needs_no_key_has_hardly_a_body(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-first\n")
    asked = "origin: https://chat.example.org", "access-control-request-method: POST"
    with door(max_body_bytes=100_000, api_keys_file=keys) as running:
        for method, path, *headers in (("GET", "/ready"), ("OPTIONS", "/v1/messages", *asked)):
            assert running.ask(method, path, *headers, body=b"x" * 50_000).status == 413
            assert running.ask(method, path, *headers).status == 200


def test_a_message_of_a_unary_call_is_bounded(plain: Door) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{plain.port}") as channel, pytest.raises(grpc.RpcError) as raised:
        GRPCInferenceServiceStub(channel).ModelInfer(pb.ModelInferRequest(raw_input_contents=[b"x" * 200_000]))
    assert raised.value.details() == "the request's body is too large"
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("headers", [["a: " + "x" * 9000], [f"a{number}: 1" for number in range(60)]])
def test_headers_are_bounded(plain: Door, headers: list[str]) -> None:
    assert plain.ask("GET", "/v2", *headers).status == 431


@pytest.mark.proof
def test_slow_clients_and_idle_connections_are_ended() -> None:
    times = {"idle_timeout_s": 0.5, "header_timeout_s": 0.5, "request_timeout_s": 1.0}
    with door(**times) as running:
        for begin, status in (
            (b"", 0),
            (b"GET /v2 HTT", 408),
            (b"GET /v2 HTTP/1.1\r\nhost: a\r\nx", 408),
            (b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{", 408),
        ):
            assert running.send(begin).status in (status, 0)
        with socket.create_connection(("127.0.0.1", running.port), 30) as connection:
            connection.sendall(PREFACE)
            read_to_end(connection)
        assert running.gateway.requests == []
        with socket.create_connection(("127.0.0.1", running.port), 30) as connection:  # requests do not last
            connection.sendall(b"POST /v1/messages?events=2 HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
            running.gateway.more.release()
            time.sleep(2)
            running.gateway.more.release()
            assert b"data: 1" in read_answer(connection).body


def test_a_stream_of_grpc_outlives_the_time_of_a_request() -> None:
    def requests() -> Iterator[pb.ModelInferRequest]:
        time.sleep(2)
        request = pb.ModelInferRequest(model_name="ensemble")
        request.inputs.add(name="stream", datatype="BOOL", shape=[1, 1])
        request.raw_input_contents.append(b"\x00")
        yield request

    with (
        door(request_timeout_s=0.5, idle_timeout_s=0.5, header_timeout_s=0.5) as running,
        grpc.insecure_channel(f"127.0.0.1:{running.port}") as channel,
    ):
        assert len(list(GRPCInferenceServiceStub(channel).ModelStreamInfer(requests()))) == 2


@pytest.mark.parametrize(("settings", "files"), [({"max_connections": 3}, 10_000), ({}, 70)])
def test_one_more_connection_than_allowed_is_closed(
    settings: dict[str, int], files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or than there are files for: without one left, Envoy would do nothing at all."""
    monkeypatch.setattr("inflight.serve.door.limits.getrlimit", lambda _: (files, files))
    with door(**settings) as running:
        held: list[socket.socket] = []

        def hold() -> bool:
            one = socket.create_connection(("127.0.0.1", running.port), 30)
            with contextlib.suppress(ConnectionError):
                one.sendall(b"GET /v2 HTTP/1.1\r\nhost: a\r\n\r\n")
                if one.recv(4096).startswith(b"HTTP/1.1 200"):
                    held.append(one)
                    return True
            one.close()
            return False

        for _ in range(3):
            assert wait_until(hold)  # the door's own look whether it serves may not have ended yet
        assert not hold()
        assert wait_until(lambda: "refused_connections_total 0" not in running.process.metrics())
        held.pop().close()
        assert wait_until(hold)
        for one in held:
            one.close()


def test_a_flood_of_questions_for_the_status_waits_its_turn() -> None:
    with door() as running, ThreadPoolExecutor(80) as pool:
        answers = [pool.submit(running.ask, "GET", "/live?events=1") for _ in range(80)]
        assert wait_until(lambda: 'inflight_door_requests{protocol="http1"} 80' in running.process.metrics())
        page = ask(running.process.folder / ADMIN_SOCKET, "/stats?filter=cluster.status.upstream_cx_overflow", 30)[1]
        for _ in answers:
            running.status.more.release()
        assert {answer.result().status for answer in answers} == {200}
        assert int(page.rpartition(":")[2]) > 0


def test_a_client_that_takes_nothing_loses_its_connection() -> None:
    with (
        door(client_timeout_s=1) as running,
        socket.create_connection(("127.0.0.1", running.port), 60) as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /v1/models?bytes=50000000 HTTP/1.1\r\nhost: a\r\n\r\n")
        assert wait_until(lambda: 'inflight_door_requests{protocol="http1"} 1' in running.process.metrics())
        assert wait_until(lambda: 'inflight_door_connections{protocol="http1"} 0' in running.process.metrics())
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += len(part)
        assert received < 50_000_000


GET, POST = b"\x82\x86\x04\x03/v2\x01\x01a", b"\x83\x86\x04\x0c/v1/messages\x01\x01a"
"""The headers of a request, of `/v2` and of `/v1/messages`, by HPACK without a dictionary."""


def read_to_end(connection: socket.socket) -> None:
    """Read until the door closes the connection."""
    while connection.recv(1 << 16):
        pass


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.mark.sweep
@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(b"".join(frame(6, 0, 0, b"12345678") for _ in range(50_000)), marks=pytest.mark.proof),  # PING
        b"".join(frame(4, 0, 0) for _ in range(50_000)),  # SETTINGS
        b"".join(frame(2, 0, 1, b"\0\0\0\0\0") for _ in range(50_000)),  # PRIORITY
        b"".join(
            frame(1, 5, stream, GET) + frame(3, 0, stream, b"\0\0\0\x08")  # RST_STREAM
            for stream in range(1, 20_001, 2)
        ),
        # The headers of one request, which CONTINUATION goes on with and never ends
        frame(1, 1, 1, GET) + b"".join(frame(9, 0, 1, b"\0\x01a\x01b") for _ in range(50_000)),
        # POST without an end, and empty DATA
        frame(1, 4, 1, POST) + b"".join(frame(0, 0, 1) for _ in range(50_000)),
    ],
    ids=["ping", "settings", "priority", "reset", "continuation", "data"],
)
def test_floods_of_http2_end_their_connection_and_nothing_else(plain: Door, flood: bytes) -> None:
    process = plain.process.process.pid
    with (
        socket.create_connection(("127.0.0.1", plain.port), 60) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(PREFACE + flood)
        read_to_end(connection)
    assert plain.ask("GET", "/v2").status == 200
    assert plain.process.process.pid == process


@pytest.mark.proof
@pytest.mark.parametrize(("more", "idle_s"), [(b"x", 3600), (b"", 1)], ids=["more comes", "nothing moves"])
def test_bodies_that_fill_its_memory_are_ended_and_others_are_served_again(
    more: bytes, idle_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body reaches the server whole, so the door keeps it until its end comes; eight are twice what it may hold."""
    monkeypatch.setattr("inflight.serve.envoy.bootstrap._SHORT_OF_MEMORY_IDLE_S", idle_s)
    part = b"x" * (15 << 20)
    head = b"POST /v2/models/ensemble/generate HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (2 * len(part))
    with door(max_memory_bytes=64 << 20, max_body_bytes=32 << 20) as running, contextlib.ExitStack() as sockets:
        clients = [sockets.enter_context(socket.create_connection(("127.0.0.1", running.port), 60)) for _ in range(8)]
        for client in clients:  # all heads first: a door with little memory left takes no more requests
            client.sendall(head)
        for client in clients:
            with contextlib.suppress(ConnectionError):
                client.sendall(part)

        def is_one_ended() -> bool:
            for client in clients:
                with contextlib.suppress(ConnectionError):
                    client.sendall(more)
            return bool(select.select(clients, [], [], 0)[0])

        assert wait_until(is_one_ended)
        sockets.close()
        assert wait_until(lambda: running.ask("GET", "/v2").status == 200)
