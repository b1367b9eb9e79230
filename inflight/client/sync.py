"""The blocking clients: the asyncio ones, run on one background event loop that all of them share.

Nothing of a request's life is written twice; a call here costs one hop to the loop's thread and back. Forked children
must make their own process anew (``spawn``), as gRPC demands anyway.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import cache, wraps
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, Unpack

from inflight.client.aio import AsyncClient, AsyncHttpClient, AsyncStream, CallOptions, Timeouts
from inflight.client.answer import Chunk, Completion
from inflight.client.request import GenerateOptions, Prompt
from inflight.client.retry import Retry

T = TypeVar("T")
P = ParamSpec("P")
_STARTING = threading.Lock()


@cache
def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="inflight-client", daemon=True).start()
    return loop


def _loop() -> asyncio.AbstractEventLoop:
    with _STARTING:  # `cache` calls twice where two threads come first
        return _start_loop()


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C above all: what runs on the loop must not outlive the call
        future.cancel()
        raise


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_BlockingClient, P], T]:
    """Return the method of the blocking clients that runs one of the asyncio clients, until it returns or Ctrl-C."""

    @wraps(method)
    def call(self: _BlockingClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return _run(getattr(self._client, method.__name__)(*args, **kwargs))

    return call


class Stream:
    """The chunks of one request as they arrive. Leaving its ``with`` block, or ``cancel``, cancels the rest."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        chunk = _run(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    async def _next(self) -> Chunk | None:
        return await anext(self._stream, None)  # None at the end: a future cannot carry StopIteration

    def cancel(self) -> None:
        """Cancel the request if it is still running; iteration then ends. Any thread may call it."""
        _run(self._stream.cancel())

    @property
    def breaks(self) -> int:
        """How often the stream has gone on after it broke."""
        return self._stream.breaks

    def completion(self) -> Completion:
        """Return what has arrived so far; its ``finish_reason`` is None while the stream runs or if it was cut."""
        return self._stream.completion()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class _BlockingClient:
    _async_type: ClassVar[type[AsyncClient] | type[AsyncHttpClient]]

    def __init__(
        self,
        url: str,
        *,
        model: str = "ensemble",
        connect_timeout: float = 5.0,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Make a client; nothing is connected before the first call. Arguments as in ``AsyncClient``."""
        self.url = url
        self._client = self._async_type(
            url, model=model, connect_timeout=connect_timeout, timeouts=timeouts, retry=retry
        )

    def stream(self, prompt: Prompt, options: GenerateOptions | None = None, **call: Unpack[CallOptions]) -> Stream:
        """Return the answer as a stream of chunks; see ``AsyncClient.stream``."""
        return Stream(self._client.stream(prompt, options, **call))

    # The loop's thread runs these in a copy of the caller's context, the current OpenTelemetry span included.
    generate = _blocking(AsyncClient.generate)
    ready = _blocking(AsyncClient.ready)
    check = _blocking(AsyncClient.check)
    problem = _blocking(AsyncClient.problem)
    served_model = _blocking(AsyncClient.served_model)
    wait_ready = _blocking(AsyncClient.wait_ready)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client(_BlockingClient):
    """Asks over gRPC: ``host:port`` or, with TLS, ``grpcs://host:port``."""

    _async_type = AsyncClient


class HttpClient(_BlockingClient):
    """Asks over HTTP: ``host:port``, ``http://host:port`` or ``https://host:port``."""

    _async_type = AsyncHttpClient
