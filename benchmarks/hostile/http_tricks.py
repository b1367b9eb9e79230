"""Requests whose bytes two readers could read differently: paths, heads, and lengths of bodies."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hostile.front import CHAT, GENERATE, Front
from benchmarks.hostile.slowness import answers_of

PATHS = (
    "/v2/../v2/models/ensemble/config",
    "/v2/models/../../etc/passwd",
    "/v2/models/%2e%2e/%2e%2e/etc/passwd",
    "/v2/%72epository/index",
    "/v2/models/ensemble/../../systemsharedmemory/region/x/register",
    "/v2/models/ensemble/%2e%2e/%2e%2e/systemsharedmemory/region/x/register",
    "/v2%2Fsystemsharedmemory%2Fregion%2Fx%2Fregister",
    "//v2/systemsharedmemory/region/x/register",
    "/v2//systemsharedmemory/region/x/register",
    "/V2/systemsharedmemory/region/x/register",
    "/v2/systemsharedmemory/region/x/register/",
    "/v2/systemsharedmemory/region/x/register?a=/v2/models/ensemble/generate",
    "/v2/systemsharedmemory/region/x/register;a=b",
    "/v2/systemsharedmemory/region/x/register%00",
    "/v2/models/ensemble%00/generate",
    "/v2/models/ensemble/versions/..%2f/generate",
    "http://localhost/v2/systemsharedmemory/region/x/register",
    "http://elsewhere.example/v2/logging",
    "/v2\\systemsharedmemory\\region\\x\\register",
    "/v1/models/../../v2/systemsharedmemory/region/x/register",
    "/v1/../metrics",
    "/invocations",
    "/predict",
    "*",
    "/" + "a" * 100_000,
    "/v2/models/" + "a/" * 20_000,
)
_SMUGGLED = b"POST /v2/systemsharedmemory/region/x/register HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"


def paths(front: Front) -> Iterator[str]:
    """Send a request to each odd path, on both ports."""
    for path in PATHS:
        for address in (front.places.http, front.gateway):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
            yield answers_of(address, head.encode())


def smuggling(front: Front) -> Iterator[str]:
    """Send heads that hide a second request in the first one's body."""
    for address, path in ((front.places.http, GENERATE), (front.gateway, CHAT)):
        start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
        for rest in _hidden():
            yield answers_of(address, start + rest)


def _hidden() -> Iterator[bytes]:
    whole = len(_SMUGGLED)
    yield b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (whole + 5) + _SMUGGLED
    yield b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n%x\r\n" % whole + _SMUGGLED + b"\r\n0\r\n\r\n"
    yield b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % whole + _SMUGGLED
    yield b"Content-Length: %d, 0\r\n\r\n" % whole + _SMUGGLED
    yield b"Content-Length: +2\r\n\r\n{}" + _SMUGGLED
    yield b"Content-Length : 2\r\n\r\n{}" + _SMUGGLED
    yield b"Transfer-Encoding: xchunked\r\nContent-Length: 2\r\n\r\n{}" + _SMUGGLED
    yield b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n" + _SMUGGLED
    yield b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + _SMUGGLED
    yield b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + _SMUGGLED
    yield b"X: a\nTransfer-Encoding: chunked\n\r\n0\r\n\r\n" + _SMUGGLED
    yield b"X: a\rTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + _SMUGGLED
    yield b"Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\n{}\r\n0\r\n\r\n" + _SMUGGLED
    yield b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n" + _SMUGGLED
    yield b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff2\r\n{}\r\n0\r\n\r\n" + _SMUGGLED
