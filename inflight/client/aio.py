"""The asyncio clients: a request's whole life (tries, waits, chunks, cancelling), the same over gRPC and HTTP.

async with AsyncClient("localhost:8001") as client:
    async with client.stream("Once upon a time") as stream:
        async for chunk in stream:
            print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypedDict, TypeVar, Unpack

from inflight.client.answer import Chunk, Collector, Completion, Health, read_chunk
from inflight.client.errors import RETRYABLE, RequestTimeout, Retryable, ServerLoading, ServerUnreachable
from inflight.client.request import GenerateOptions, Prompt, Request, build_request
from inflight.client.resume import Resumption, merged
from inflight.client.retry import Attempts, Retry
from inflight.client.transport import Transport, find_problem, inspect, make_transport, parse_address
from inflight.contract import ENGINE
from inflight.errors import DeadlineExceeded, EngineFailure, InflightError, InvalidRequest, UnsupportedFeature

T = TypeVar("T")
_ABOUT_S = 2.0
"""How long a client waits for what the server says of its model."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one request in seconds; None: no limit."""

    first_chunk: float | None = 300.0
    """The longest time from the call to the first chunk of a stream."""
    between_chunks: float | None = 60.0
    """The longest time from one chunk of a stream to the next."""
    total: float | None = None
    """The longest time from the call to the end; the only limit of a request that does not stream."""


class Patience:
    """Waits for the steps of one request, as long as its timeouts allow or until ``interrupt`` is called."""

    def __init__(self, timeouts: Timeouts, *, stream: bool) -> None:
        self._timeouts = timeouts
        self._stream = stream
        self._started = time.monotonic()
        self._arrived: float | None = None
        self._pending: asyncio.Future[Any] | None = None
        self.interrupted = False

    def arrived(self) -> None:
        """Note that a chunk has arrived."""
        self._arrived = time.monotonic()

    def interrupt(self) -> None:
        """Break off the wait in progress and refuse all later ones; from the same event loop, any task."""
        self.interrupted = True
        if self._pending is not None:
            self._pending.cancel()

    async def wait(self, step: Awaitable[T]) -> T | None:
        """Return the result of ``step``, or None if interrupted. ``step`` never outlives this call.

        Raises:
            RequestTimeout: naming the limit that passed.
        """
        limit, name, seconds = self._nearest_limit()
        task = self._pending = asyncio.ensure_future(step)
        if self.interrupted:
            task.cancel()
        try:
            await asyncio.wait({task}, timeout=None if limit is None else max(limit - time.monotonic(), 0.0))
            if not task.done():
                raise RequestTimeout(f"{name} of {seconds:g} s passed")
            return None if self.interrupted and task.cancelled() else task.result()
        finally:
            self._pending = None
            if not task.done():
                task.cancel()
                await _end_of(task)

    def _nearest_limit(self) -> tuple[float | None, str, float]:
        """Return the moment, name and seconds of the limit that passes first."""
        limits = [(self._started, "total", self._timeouts.total)]
        if self._stream and self._arrived is None:
            limits.append((self._started, "first_chunk", self._timeouts.first_chunk))
        elif self._stream and self._arrived is not None:
            limits.append((self._arrived, "between_chunks", self._timeouts.between_chunks))
        moments = [(since + seconds, name, seconds) for since, name, seconds in limits if seconds is not None]
        return min(moments, default=(None, "", 0.0))


async def _end_of(task: asyncio.Future[Any]) -> None:
    """Wait until a cancelled task has ended, also if the waiting is cancelled meanwhile: that is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class CallOptions(TypedDict, total=False):
    """What a call may say beside its prompt and how to answer it."""

    request_id: str
    """Names the request to ``stop``, in traces and in the server's log."""
    timeouts: Timeouts | None
    """Limits in place of the client's."""
    trace_context: Mapping[str, str] | None
    """W3C ``traceparent`` and ``tracestate``; None: the current OpenTelemetry span's, if the application uses
    OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a deployment."""

    name: str
    max_sequence_length: int | None
    """Tokens of prompt and answer together; None: the engine has no limit."""
    default_max_tokens: int
    """The limit of an answer whose request sets none."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """How the model's makers sample: temperature, top_p, top_k, min_p, repetition_penalty, as far as they say."""


class AsyncStream:
    """The chunks of one request as they arrive. Leaving its ``async with`` block, or ``cancel``, cancels the rest."""

    def __init__(self, transport: Transport, request: Request, patience: Patience, retry: Retry) -> None:
        self._patience = patience
        self._collector = Collector(request.sequences)
        self._resumption = Resumption(request, self._collector, retry.resume)
        self._chunks = _chunks(transport, self._resumption, patience, retry)
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

    @property
    def breaks(self) -> int:
        """How often the stream has gone on after it broke."""
        return self._resumption.breaks

    def completion(self) -> Completion:
        """Return what has arrived so far; its ``finish_reason`` is None while the stream runs or if it was cut."""
        return self._collector.completion()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()


async def _chunks(
    transport: Transport, resumption: Resumption, patience: Patience, retry: Retry
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a request, trying again while that is safe. The caller collects each before the next."""
    attempts = Attempts(retry)
    while True:
        progressed = False
        try:
            streams = [_read(transport, one) for one in resumption.requests()]
            async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as chunks:
                while chunk := await patience.wait(anext(chunks, None)):
                    progressed = True
                    patience.arrived()
                    yield chunk
            if patience.interrupted or resumption.done or not retry.resume:
                return
            error: Retryable = ServerUnreachable("the stream ended before its last response", broke=True)
        except RETRYABLE as failure:
            error = failure
        except DeadlineExceeded:
            if not (last := resumption.ended_by_deadline()):
                raise
            for chunk in last:
                yield chunk
            return
        except (InvalidRequest, UnsupportedFeature) as refusal:
            if not resumption.goes_without_ids(refusal):
                raise
            continue
        if resumption.done:
            return
        pause = attempts.pause(error, progressed)
        if pause is None or not resumption.can_go_on:
            raise error
        await patience.wait(asyncio.sleep(resumption.within_deadline(pause)))


async def _read(transport: Transport, request: Request) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of one try."""
    async with aclosing(transport.replies(request)) as replies:
        async for outputs in replies:
            chunk = read_chunk(outputs, request.top_log_probs, request.log_prob_ids)
            yield replace(chunk, index=request.index) if request.index else chunk


class _BaseClient:
    _scheme: ClassVar[str]
    """The scheme of an address that names none."""

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
        self, prompt: Prompt, options: GenerateOptions | None = None, **call: Unpack[CallOptions]
    ) -> AsyncStream:
        """Return the answer to ``prompt`` (a text or a list of chat messages) as a stream of chunks.

        Args:
            prompt: what to answer.
            options: how.
            call: ``request_id``, ``timeouts`` and ``trace_context``; see ``CallOptions``.

        Raises:
            InvalidRequest: at once, for a value that no tensor can carry; while iterating, for what the server refuses.
            InflightError: while iterating: ServerUnreachable, RequestTimeout, or the server's error.
        """
        return self._start(prompt, options, stream=True, **call)

    async def generate(
        self, prompt: Prompt, options: GenerateOptions | None = None, **call: Unpack[CallOptions]
    ) -> Completion:
        """Return the whole answer to ``prompt``; raises what ``stream`` raises. Cancelling the task cancels it."""
        async with self._start(prompt, options, stream=False, **call) as stream:
            async for _ in stream:
                pass
            return stream.completion()

    def _start(
        self,
        prompt: Prompt,
        options: GenerateOptions | None,
        *,
        stream: bool,
        request_id: str = "",
        timeouts: Timeouts | None = None,
        trace_context: Mapping[str, str] | None = None,
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
        return await find_problem(address, self._model, self._transport)

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
        """Return the model that the server serves; None if it does not say (``observability.inspection``)."""
        address = parse_address(self.url, self._scheme)
        engine = make_transport(address.scheme, address.url, ENGINE, _ABOUT_S)
        try:
            snapshot = await asyncio.wait_for(inspect(engine, self.url), _ABOUT_S)
            return ServedModel(**json.loads(snapshot)["model"])
        except (TimeoutError, InflightError, LookupError, TypeError, ValueError):
            return None
        finally:
            await engine.close()

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient(_BaseClient):
    """Asks over gRPC: ``host:port`` or, with TLS, ``grpcs://host:port``."""

    _scheme = "grpc"


class AsyncHttpClient(_BaseClient):
    """Asks over HTTP: ``host:port``, ``http://host:port`` or ``https://host:port``."""

    _scheme = "http"
