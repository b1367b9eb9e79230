"""HTTP as uvicorn speaks it, with limits on what a client may do before and after its request.

uvicorn's own protocol bounds neither the bytes nor the time of a request's head, and answers what is not HTTP in plain
text. A client that sends its next request before it has the answer to the last one (pipelining) would not be seen
leaving, since reading stops then: here the next request is not read, and the connection ends with the answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inflight.gateway.errors import ApiError

MOST_HEAD_BYTES = 64 << 10
"""Bytes of a request's first line and headers."""
MOST_REFUSED_BYTES = 64 << 20
"""Bytes of a body that are read and forgotten after an answer that did not need it; with more the connection ends. A
client that sends before it reads gets that answer, not a broken connection."""


class GatewayConfig(Config):
    """uvicorn's settings, and the gateway's."""

    def __init__(self, app: Any, client_timeout_s: float, **settings: Any) -> None:
        """A client has ``client_timeout_s`` for a request's head, and to take the rest of an answer."""
        super().__init__(app, http=GatewayProtocol, **settings)
        self.client_timeout_s = client_timeout_s


class GatewayProtocol(HttpToolsProtocol):
    """One connection."""

    config: GatewayConfig
    _head_bytes = _refused_bytes = 0
    _in_head = True
    _deaf = False
    """Whether what comes is forgotten: the connection ends with the answer that is under way."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent, within the limits."""
        if self._deaf or self.transport.is_closing():
            return
        if self._in_head:
            self._arm()
            self._head_bytes += len(data)
        super().data_received(data)
        # A part of a head that came with the body before it is not counted: at most what one read brings.
        if self._in_head and self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            message = f"the request's line and headers have more than {MOST_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        """Begin a request, unless the one before has no answer yet."""
        if self.cycle is not None and not self.cycle.response_complete:
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
        """Take a header."""
        if not self._deaf:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if not self._deaf:
            self._in_head, self._head_bytes, self._refused_bytes = False, 0, 0
            self._disarm()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        if self._deaf:
            return
        if self.cycle.response_complete:
            self._refused_bytes += len(body)
            if self._refused_bytes > MOST_REFUSED_BYTES:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request; another may begin."""
        if not self._deaf:
            super().on_message_complete()
            self._in_head = True

    def on_response_complete(self) -> None:
        """End an answer; the client must take what is left of it in time."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self.config.client_timeout_s, self._abort_unread)

    def send_400_response(self, msg: str) -> None:
        """Answer to what is not HTTP, in OpenAI's shape."""
        self._refuse(ApiError(400, msg, code="invalid_request_error"))

    def _abort_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer without a request, unless another answer is under way, and close the connection."""
        if self.cycle is None or self.cycle.response_complete:
            body = json.dumps(error.body()).encode()
            head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _arm(self) -> None:
        """Bound the time of the head that comes; a part of it does not prolong it."""
        if self._timer is None:
            self._timer = self.loop.call_later(self.config.client_timeout_s, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
