"""HTTP as uvicorn speaks it, with limits on what a client may do before and after its request.

uvicorn's own protocol bounds neither the bytes nor the time of a request's head, takes trailers for headers, and
answers what is not HTTP in plain text. A client that sends its next request before it has the answer to the last one
(pipelining) would not be seen leaving, since reading stops then: here the next request is not read, and the connection
ends with the answer.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from uvicorn import Config
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inflight.gateway.errors import ApiError

MOST_HEAD_BYTES = 64 << 10
"""Bytes of a request's first line and headers; and bytes in a row behind them that are not of its body: the sizes and
extensions of chunks, trailers, empty lines."""
MOST_REFUSED_BYTES = 64 << 20
"""Bytes of a body that are read and forgotten after an answer that did not need it; with more the connection ends. A
client that sends before it reads gets that answer, not a broken connection."""
_OFFER = re.compile(rb"\nupgrade:", re.IGNORECASE)
_OFFERS, _END = b"upgrade:", b"\r\n\r\n"
_TOO_LARGE = "headers_too_large"


class _Head:
    """A request's line and headers as they come, in any pieces, without the header that offers another protocol.

    The parser takes what comes behind such a head for that protocol, and the body would be lost. Java's client offers
    HTTP/2 with every request.
    """

    def __init__(self) -> None:
        self.size = 0
        """Bytes of it that have come."""
        self._kept = b""
        """Bytes that may be the beginning of the header's name."""
        self._before = b""
        """The last bytes that were handed on."""

    def take(self, data: bytes) -> bytes:
        """Return what the parser gets of the next piece, and of what was kept of the last one.

        Empty lines before the head are left out: two of them would be its end.
        """
        if not self._before:
            come, data = len(data), data.lstrip(b"\r\n")
            self.size += come - len(data)
        known = self._before + self._kept + data
        place = known.find(_END)
        size = len(known) if place < 0 else place + len(_END)
        self.size += min(len(data), max(0, size - len(self._before) - len(self._kept)))
        head, rest = known[:size], known[size:]
        line = head.rfind(b"\n") + 1
        is_cut = place < 0 and line > 0 and line < size and _OFFERS.startswith(head[line:].lower())
        self._kept, head = (head[line:], head[:line]) if is_cut else (b"", head)
        whole = _OFFER.sub(b"\nrefused-upgrade:", head)[len(self._before) :] + rest
        self._before = (self._before + whole)[1 - len(_END) :]
        return whole


class GatewayConfig(Config):
    """uvicorn's settings, and the gateway's."""

    def __init__(self, app: Any, client_timeout_s: float, most_connections: int, **settings: Any) -> None:
        """
        Args:
            app: the application.
            client_timeout_s: what a client has for a request's head, and to take the rest of an answer.
            most_connections: are open at once; for one more, the one that has been idle for longest ends, rather than
                one whose client still takes the rest of an answer.
            settings: uvicorn's.
        """
        super().__init__(app, http=GatewayProtocol, **settings)
        self.client_timeout_s, self.most_connections = client_timeout_s, most_connections
        self.idle: dict[GatewayProtocol, None] = {}
        """Connections without a request under way, the one that has been so for longest first. The client may still
        have to take the rest of its last answer."""


class GatewayProtocol(HttpToolsProtocol):
    """One connection."""

    config: GatewayConfig
    _beside_bytes = _refused_bytes = 0
    """Bytes since the last one of a body; bytes of a body that comes after its answer."""
    _in_head = True
    """Whether the last request has come to its end."""
    _head: _Head
    """The head that comes, where one does."""
    _deaf = False
    """Whether what comes is forgotten: the connection ends with the answer that is under way."""
    _timer: asyncio.TimerHandle | None = None
    """Closes the connection, unless the client sends what it owes: a head, or the rest of a body after its answer."""
    _unread: asyncio.TimerHandle | None = None
    """Closes the connection, unless the client takes the rest of the last answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._head = _Head()
        self._arm()
        self.config.idle[self] = None
        if len(self.connections) > self.config.most_connections:
            self._make_room()

    def _make_room(self) -> None:
        """End the connection that is idle for longest; only where it must be, one whose client still reads."""
        *others, _ = self.config.idle
        oldest = next(
            (one for one in others if not one.transport.get_write_buffer_size()), next(iter(self.config.idle))
        )
        del self.config.idle[oldest]
        oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._disarm()
        self._forget_unread()
        self.config.idle.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent, within the limits."""
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head and self._has_answered:
            self._arm()
        if self._in_head:
            data = self._head.take(data)
            if self._head.size > MOST_HEAD_BYTES:
                self._refuse_size()
                return
        self._beside_bytes += len(data)
        if data:  # to the parser nothing is the end
            super().data_received(data)
        # What came with a part of a body and behind it is not counted: at most what one read brings.
        if self._beside_bytes > MOST_HEAD_BYTES and not (self._deaf or self.transport.is_closing()):
            self._refuse_size()

    def _refuse_size(self) -> None:
        what = "line and headers have" if self._in_head else "chunks and trailers have, beside the body,"
        self._refuse(ApiError(431, f"the request's {what} more than {MOST_HEAD_BYTES} bytes", code=_TOO_LARGE))

    def on_message_begin(self) -> None:
        """Begin a request, unless the one before has no answer yet."""
        if not self._has_answered:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope["state"]["abort"] = self.transport.abort  # type: ignore[typeddict-item]

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        if not self._deaf:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what comes behind a body, a trailer, is forgotten."""
        if self._in_head and not self._deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if not self._deaf:
            super().on_headers_complete()  # raises where the URL is none
            if self.scope["http_version"] == "1.0":
                self.cycle.waiting_for_100_continue = False  # such a client would take a 100 for the answer
                self.cycle.send = _Unchunked(self.cycle)  # type: ignore[method-assign]
            self._in_head, self._beside_bytes, self._refused_bytes = False, 0, 0
            self._disarm()
            self._forget_unread()
            self.config.idle.pop(self, None)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if self._deaf:
            return
        self._beside_bytes = 0
        if self.cycle.response_complete:
            self._refused_bytes += len(body)
            if self._refused_bytes > MOST_REFUSED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; another may begin."""
        if not self._deaf:
            super().on_message_complete()
            self._in_head, self._beside_bytes, self._head = True, 0, _Head()

    def on_response_complete(self) -> None:
        """End an answer; the client must take what is left of it in time, and send what is left of its request."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.config.idle[self] = None
        if self.transport.get_write_buffer_size():
            self._forget_unread()
            self._unread = self.loop.call_later(self.config.client_timeout_s, self._abort_unread)
        if not self._in_head:
            self._arm()

    def send_400_response(self, msg: str) -> None:
        """Answer to what is not HTTP, in OpenAI's shape; not to what comes behind a request that is being answered."""
        if not self._deaf:
            self._refuse(ApiError(400, msg, code="invalid_request_error"))

    @property
    def _has_answered(self) -> bool:
        """Whether no answer is under way."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _abort_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, unless its answer has begun, and close the connection."""
        if self._in_head if self._has_answered else not self.cycle.response_started:
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        if not self._has_answered:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _arm(self) -> None:
        """Bound the time of the head that comes; a part of it does not prolong it."""
        if self._timer is None:
            self._timer = self.loop.call_later(self.config.client_timeout_s, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Unchunked:
    """Sends an answer to a client of HTTP/1.0, which knows no chunks: a stream ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._send, self._is_open = cycle, cycle.send, False

    async def __call__(self, message: ASGISendEvent) -> None:
        """Send a part of the answer."""
        if message["type"] == "http.response.start":
            self._is_open = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._is_open:
                self._cycle.chunked_encoding = False
        elif self._is_open and message["type"] == "http.response.body":
            # uvicorn counts what is left of a length that is announced: this part, and something if more comes.
            self._cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
        await self._send(message)
