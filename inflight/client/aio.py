"""The asyncio clients: a request's whole life (tries, waits, chunks, cancelling), the same over gRPC and HTTP.

async with AsyncClient("localhost:8001") as client:
    async with client.stream("Once upon a time") as stream:
        async for chunk in stream:
            print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import ClassVar, TypeVar

from inflight.client.about import ServedModel, served_model
from inflight.client.address import Address, parse_address
from inflight.client.answer import Chunk, Collector, Completion, Outputs, read_chunk
from inflight.client.errors import RETRYABLE, ServerLoading
from inflight.client.patience import Patience, Retry, Timeouts
from inflight.client.reach import Health, find_problem
from inflight.client.request import GenerateOptions, Prompt, Request, build_request
from inflight.client.transport import Transport, make_transport
from inflight.contract import ENGINE
from inflight.errors import EngineFailure, InflightError

Self = TypeVar("Self", bound="_BaseClient")
_END: Outputs = {}
_LOOK_S = 2.0
"""What a look at an address may take that requests do not go to."""


class AsyncStream:
    """The chunks of one request as they arrive. Leaving its ``async with`` block, or ``cancel``, cancels the rest."""

    def __init__(self, transport: Transport, request: Request, patience: Patience, retry: Retry) -> None:
        self._patience = patience
        self._collector = Collector(request.sequences)
        self._chunks = _chunks(transport, request, patience, retry)
        self._turn = asyncio.Lock()  # a cancel from another task waits until the chunk in progress is broken off

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        async with self._turn:
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                if not self._collector.complete and not self._patience.interrupted:
                    raise EngineFailure("the stream ended before its last response") from None
                raise
            self._collector.add(chunk)
            return chunk

    async def cancel(self) -> None:
        """Cancel the request if it is still running; iteration then ends. Any task of the event loop may call it."""
        self._patience.interrupt()
        async with self._turn:
            await self._chunks.aclose()

    def completion(self) -> Completion:
        """Return what has arrived so far; its ``finish_reason`` is None while the stream runs or if it was cut."""
        return self._collector.completion()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()


async def _chunks(
    transport: Transport, request: Request, patience: Patience, retry: Retry
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of ``request``, trying again while nothing has arrived and it is safe."""
    for pause in retry.pauses():
        replies = transport.replies(request)
        started = False
        try:
            while outputs := await patience.wait(anext(replies, _END)):
                started = True
                patience.arrived()
                yield read_chunk(outputs, request.top_log_probs)
            return
        except RETRYABLE:
            if started or pause is None:
                raise
        finally:
            await replies.aclose()
        await patience.wait(asyncio.sleep(pause))


class _BaseClient:
    _scheme: ClassVar[str]
    """Of an address that names none."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "ensemble",
        connect_timeout: float = 5.0,
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
    ) -> None:
        """Make a client; nothing is connected before the first call.

        Args:
            url: address of the server.
            model: the Triton model to ask.
            connect_timeout: seconds that one try to connect may take.
            timeouts: limits of every request that does not bring its own.
            retry: when to try again.

        Raises:
            UnsupportedFeature: it is to ask over gRPC, and the libraries of gRPC are not installed.
        """
        self.url = url
        self._model = model
        self._transport = make_transport(self._scheme, url, model, connect_timeout)
        self._timeouts = timeouts or Timeouts()
        self._retry = retry or Retry()

    def stream(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        request_id: str = "",
        timeouts: Timeouts | None = None,
        trace_context: Mapping[str, str] | None = None,
    ) -> AsyncStream:
        """Return the answer to ``prompt`` (a text or a list of chat messages) as a stream of chunks.

        Args:
            prompt: what to answer.
            options: how.
            request_id: names the request to ``stop``, in traces and in the server's log.
            timeouts: in place of the client's.
            trace_context: W3C ``traceparent`` and ``tracestate``; None: the current OpenTelemetry span's, if the
                application uses OpenTelemetry.

        Raises:
            InvalidRequest: at once, for a value that no tensor can carry; while iterating, for what the server refuses.
            InflightError: while iterating: ServerUnreachable, RequestTimeout, or the server's error.
        """
        return self._start(prompt, options, True, request_id, timeouts, trace_context)

    async def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        request_id: str = "",
        timeouts: Timeouts | None = None,
        trace_context: Mapping[str, str] | None = None,
    ) -> Completion:
        """Return the whole answer to ``prompt``; raises what ``stream`` raises. Cancelling the task cancels it."""
        async with self._start(prompt, options, False, request_id, timeouts, trace_context) as stream:
            async for _ in stream:
                pass
            return stream.completion()

    def _start(
        self,
        prompt: Prompt,
        options: GenerateOptions | None,
        stream: bool,
        request_id: str,
        timeouts: Timeouts | None,
        trace_context: Mapping[str, str] | None,
    ) -> AsyncStream:
        chosen = options or GenerateOptions()
        request = build_request(prompt, chosen, stream=stream, request_id=request_id, trace_context=trace_context)
        patience = Patience(timeouts or self._timeouts, stream=stream)
        return AsyncStream(self._transport, request, patience, self._retry)

    async def ready(self) -> bool:
        """Return whether the server is up and the model can serve."""
        return await self._transport.health() is Health.READY

    async def problem(self) -> InflightError | None:
        """Return why the model cannot be asked, in one line that says what to do about it; None: it can.

        Raises:
            InvalidRequest: the client's address is none.
        """
        address = parse_address(self.url, self._scheme)
        return await find_problem(address, self._model, self._transport, lambda other: transport_to(other, self._model))

    async def check(self, loading_s: float = 0.0) -> None:
        """Return if the model can be asked, at once or within ``loading_s`` seconds of a server that still loads.

        Raises:
            InflightError: it cannot, as ``problem`` says.
        """
        deadline = time.monotonic() + loading_s
        while problem := await self.problem():
            if not isinstance(problem, ServerLoading) or time.monotonic() >= deadline:
                raise problem
            await asyncio.sleep(0.1)

    async def served_model(self) -> ServedModel | None:
        """Return what the server tells of the model that it serves; None if it does not."""
        address = parse_address(self.url, self._scheme)
        return await served_model(transport_to(address, ENGINE))

    async def wait_ready(self, timeout: float = 120.0) -> None:
        """Wait until the server is ready, also for one that is not there yet.

        Raises:
            InflightError: it is not after ``timeout`` seconds; the message is what ``problem`` says.
        """
        deadline = time.monotonic() + timeout
        while not await self.ready():
            if time.monotonic() >= deadline:
                if problem := await self.problem():
                    raise type(problem)(f"not ready after {timeout:g} s: {problem}")
                return
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the connections; requests still running are cancelled."""
        await self._transport.close()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncClient(_BaseClient):
    """Asks over gRPC: ``host:port`` or, with TLS, ``grpcs://host:port``."""

    _scheme = "grpc"


class AsyncHttpClient(_BaseClient):
    """Asks over HTTP: ``host:port``, ``http://host:port`` or ``https://host:port``."""

    _scheme = "http"


def transport_to(address: Address, model: str) -> Transport:
    """Return a transport for a look at ``address``, in its protocol."""
    return make_transport(address.scheme, address.url, model, _LOOK_S)
