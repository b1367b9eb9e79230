"""The status server: what `inflight serve` says of itself over HTTP, also while its server starts, restarts or stops.

- ``/live``, ``/v2/health/live``: 200 as long as this process lives.
- ``/ready``, ``/v2/health/ready``: 200 where a generation has passed since the last start and the gateway answers; else
  503.
- ``/status``: the state, since when, and the restarts by their cause, as JSON.
- ``/metrics``: one page of all parts.

The last two need a key where anything else does, so a port that asks for none has only probes then.

It answers one request on each connection, in one thread; what takes long, the page of metrics, is kept for a moment.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from http import HTTPStatus

from inflight.addresses import nearest_of
from inflight.serve.envoy.replies import RETRY_AFTER_S
from inflight.serve.envoy.values import SHOULD_RETRY
from inflight.serve.metrics_page import CONTENT_TYPE, MetricsPage
from inflight.serve.server import address_of, require_free
from inflight.serve.status import State, Status

KEPT_S = 0.5
"""How long a page of metrics is given out again."""
_REQUEST_S = 5.0
"""The time that a request may take, and its answer."""
_HEAD_BYTES = 16 << 10
_CONNECTIONS, _BACKLOG = 512, 512
"""Connections at once; one more is closed."""
_LIVE, _READY = ("/live", "/v2/health/live"), ("/ready", "/v2/health/ready")
_Answer = tuple[HTTPStatus, str, bytes]
"""A status, the type of the content, and the content."""


class StatusServer:
    """Answers from ``start`` to ``stop``, in a thread of its own."""

    def __init__(
        self, host: str, port: int, status: Status, page: MetricsPage | None, *, probes_only: bool = False
    ) -> None:
        """It listens on ``host`` and ``port``; ``page`` None: there are no metrics; ``probes_only``: nor the status."""
        self._host, self._port, self._status, self._page = host, port, status, page
        self._probes_only = probes_only
        self._kept: tuple[float, bytes] | None = None
        """When the last page was made, and the page."""
        self._making: asyncio.Lock | None = None
        self._connections = 0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """``host:port`` at which this machine reaches it."""
        return f"{nearest_of(self._host)}:{self._port}"

    def start(self) -> None:
        """Listen, and answer from here on.

        Raises:
            DeploymentError: the port cannot be used.
            OSError: the system gives no socket.
        """
        address = address_of(self._host)
        require_free(address, "status_port", self._port)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, self._port), family=family, backlog=_BACKLOG)
        started = Future[None]()
        self._thread = threading.Thread(target=self._run, args=(listener, started), name="status", daemon=True)
        self._thread.start()
        started.result()

    def stop(self) -> None:
        """Answer no more."""
        if self._loop is not None and self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        if self._thread is not None:
            self._thread.join()
        if self._page is not None:
            self._page.close()
        self._thread = self._loop = self._ended = None

    def _run(self, listener: socket.socket, started: Future[None]) -> None:
        try:
            asyncio.run(self._serve(listener, started))
        except Exception as error:
            listener.close()
            if started.done():
                raise
            started.set_exception(error)  # of too many open files, say

    async def _serve(self, listener: socket.socket, started: Future[None]) -> None:
        server = await asyncio.start_server(self._take, sock=listener, limit=_HEAD_BYTES)
        self._loop, self._ended, self._making = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        started.set_result(None)
        await self._ended.wait()
        server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            # Otherwise the client has left, or has not spoken HTTP, or read, in time.
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_S):
                    if self._connections <= _CONNECTIONS:
                        writer.write(await self._answer(await reader.readuntil(b"\r\n\r\n")))
                    writer.close()
                    await writer.wait_closed()
        finally:
            self._connections -= 1
            writer.transport.abort()  # nothing is kept for a client that does not read

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _write(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET and HEAD are served\n", with_body=True)
        status, kind, body = await self._route(path)
        return _write(status, kind, body, with_body=method == "GET")

    async def _route(self, path: str) -> _Answer:
        answers: dict[str, Callable[[], Awaitable[_Answer]]] = dict.fromkeys(_LIVE, self._live)
        answers |= dict.fromkeys(_READY, self._ready)
        if not self._probes_only:
            answers |= {"/status": self._about} | ({} if self._page is None else {"/metrics": self._metrics})
        if path not in answers:
            shown = [one for one in answers if not one.startswith("/v2")]
            return HTTPStatus.NOT_FOUND, "text/plain", f"{', '.join(shown)} are served\n".encode()
        return await answers[path]()

    async def _live(self) -> _Answer:
        return HTTPStatus.OK, "text/plain", b"live\n"

    async def _ready(self) -> _Answer:
        ready, state = self._status.ready, self._status.state
        text = state.value if ready or state is not State.READY else "the gateway does not answer yet"
        return HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{text}\n".encode()

    async def _about(self) -> _Answer:
        return HTTPStatus.OK, "application/json", json.dumps(self._status.snapshot()).encode()

    async def _metrics(self) -> _Answer:
        assert self._page is not None, "there are no metrics"
        assert self._making is not None, "it was not started"
        async with self._making:  # those that wait here find the page that the first of them has made
            if self._kept is None or time.monotonic() - self._kept[0] > KEPT_S:
                page = await asyncio.to_thread(self._page.collect)
                self._kept = time.monotonic(), page
        return HTTPStatus.OK, CONTENT_TYPE, self._kept[1]


def _write(status: HTTPStatus, kind: str, body: bytes, *, with_body: bool) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"content-type: {kind}", f"content-length: {len(body)}"]
    lines += ["connection: close", "cache-control: no-store"]
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        lines += [f"retry-after: {RETRY_AFTER_S}", f"{SHOULD_RETRY}: true"]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + (body if with_body else b"")
