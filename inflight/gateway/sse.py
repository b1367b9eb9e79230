"""Server-sent events, and answers that end when their client leaves.

A stream is read by one task and written by another. What the client's socket has not taken yet waits here, joined to
one piece, up to ``max_pending_bytes``. While there is no room for the next event, no more are taken; a client that has
not made room within ``client_timeout_s`` is disconnected, and its work is cancelled. So a slow reader costs bounded
memory and does not hold the engine up, and a fast one may get events of any size. A client that leaves is noticed at
once, by the message ``http.disconnect``, whether its answer is streamed or not.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.gateway.context import gateway_of
from inflight.gateway.errors import STOPPING, ApiError, as_api_error, away

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams of completions."""
_LAST_WORD_S = 0.5
COMMENT = b": keep-alive\n\n"


def event(data: str | bytes, name: str | None = None) -> bytes:
    """Return one event; ``data`` is JSON in one line, ``name`` the type of typed events."""
    raw = data.encode() if isinstance(data, str) else data
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + raw + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event with which OpenAI's streams of completions fail: the stream then ends without ``DONE``."""
    return event(json.dumps(error.body()))


class ClientGone(Exception):
    """The client has left; nobody reads the answer, and the work is cancelled."""


class SlowClient(ClientGone):
    """The client reads too slowly, and is disconnected."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``; cancel it and wait for its end if the client leaves first.

    The request's body must have been read.

    Raises:
        ClientGone: the client has left.
        Exception: what ``work`` raises.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(gone)
        await _end(task)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task if it has not ended, and wait until it has. What it raises then is of no interest."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """A response of server-sent events.

    The response begins with the first event, so an error before it has a status of its own, and a client that measures
    the time to the first byte measures the engine's. With ``stream_keep_alive_s`` it begins at the first comment.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[bytes],
        *,
        last: bytes = DONE,
        on_error: Callable[[ApiError], bytes] = error_event,
        headers: dict[str, str] | None = None,
    ) -> None:
        """
        Args:
            request: whose body has been read.
            events: the events, each made by ``event``; closed if the client leaves. What it raises ends the stream.
            last: what is sent at the end of ``events``; not after an error.
            on_error: makes the event of an error that comes after the first event.
            headers: more headers.
        """
        super().__init__(None, headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        settings = gateway_of(request).settings
        self._events, self._last, self._on_error = events, last, on_error
        self._limit, self._keep_alive_s = settings.max_pending_bytes, settings.stream_keep_alive_s
        self._timeout_s = settings.client_timeout_s
        self._pending = bytearray()
        self._ended = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ClientGone; and what ``events`` raise before the first of them."""
        reading = asyncio.create_task(self._read())
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            tasks = {reading, writing, gone}
            while not writing.done():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if reading in done:
                    reading.result()
                    tasks.discard(reading)
                if gone in done and not writing.done():
                    raise ClientGone
            writing.result()
        except asyncio.CancelledError:  # the gateway stops, and the stream has had its time
            await _end(writing)
            if not self._begun:
                raise
            async with asyncio.timeout(_LAST_WORD_S):
                await self._send(send, bytes(self._pending) + self._on_error(away(STOPPING)), True)
        finally:
            for task in (gone, writing, reading):
                await _end(task)
            await _close(self._events)

    async def _read(self) -> None:
        """Take the events as fast as they come."""
        try:
            async for one in self._events:
                await self._add(one)
            await self._add(self._last)
        except ClientGone:
            raise
        except Exception as error:
            if not self._begun and not self._pending:
                raise
            told = as_api_error(error)
            if told.status >= 500:
                log.error("a stream failed", exc_info=error)
            await self._add(self._on_error(told))
        self._ended = True
        self._news.set()

    async def _add(self, piece: bytes) -> None:
        """Have a piece sent, as soon as there is room for it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._pending and len(self._pending) + len(piece) > self._limit:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise SlowClient from None
        self._pending += piece
        self._news.set()

    async def _write(self, send: Send) -> None:
        """Send what is pending, as one piece, whenever the socket takes it."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._keep_alive_s)
            self._news.clear()
            ended = self._ended
            waiting = len(self._pending)
            piece = bytes(self._pending) or (b"" if ended else COMMENT)
            await self._send(send, piece, ended)
            del self._pending[:waiting]
            self._room.set()
            if ended:
                return

    async def _send(self, send: Send, piece: bytes, ended: bool) -> None:
        if not self._begun:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._begun = True
        await send({"type": "http.response.body", "body": piece, "more_body": not ended})


async def _close(events: AsyncIterator[bytes]) -> None:
    close: Callable[[], Awaitable[None]] | None = getattr(events, "aclose", None)
    if close is not None:
        await close()
