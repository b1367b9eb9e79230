"""HTTP: one POST to ``generate_stream`` per request. Knows nothing of retries, timeouts or chunks.

A request that does not stream takes ``generate_stream`` too, and gets one event: Triton notices that a client of
``generate_stream`` has gone and cancels, but lets a request to plain ``generate`` run on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import httpx

from inflight.addresses import direct_mounts, tls_context
from inflight.client.answer import Health, Outputs
from inflight.client.errors import STATUS_OF_HTTP, ServerUnreachable, from_wire, seconds
from inflight.client.request import INPUTS, Request
from inflight.errors import EngineFailure, InflightError, QueueFull

EVENT = b"data:"
"""Beginning of a line that carries an event of a stream."""


class HttpTransport:
    """Connections to ``url``: ``host:port``, ``http://host:port`` or ``https://host:port``."""

    def __init__(self, url: str, model: str, connect_timeout: float) -> None:
        self._url = url if "://" in url else f"http://{url}"
        self._path = f"/v2/models/{model}"
        self._connect_timeout = connect_timeout
        self._http: httpx.AsyncClient | None = None

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:  # not before the first call: connections belong to the event loop they are made in
            unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._http = httpx.AsyncClient(
                base_url=self._url,
                timeout=httpx.Timeout(None, connect=self._connect_timeout),
                limits=unlimited,
                mounts=direct_mounts(self._url),
                verify=tls_context(),
            )
        return self._http

    async def replies(self, request: Request) -> AsyncGenerator[Outputs, None]:
        """Send ``request`` and yield its responses; closing the generator closes the connection, which cancels.

        Raises:
            InflightError: the server's error, or ServerUnreachable.
        """
        try:
            url, headers = f"{self._path}/generate_stream", dict(request.trace_context)
            async with self._client().stream("POST", url, json=body(request), headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise error_of(response.status_code, await response.aread(), response.headers.get("retry-after"))
                async for event in _events(response):
                    yield read_event(event)
        except httpx.RequestError as error:
            broke = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise ServerUnreachable(f"{self._url}: {error or type(error).__name__}", broke=broke) from error

    async def health(self) -> Health:
        """Return what the server says of itself and of the model."""
        try:
            if await self._says_yes("/v2/no-such-path"):  # so does Triton's metrics port
                return Health.SILENT
            if await self._says_yes(f"{self._path}/ready"):
                return Health.READY
            if await self._says_yes("/v2/health/ready"):  # the model may have become ready with it just now
                return Health.READY if await self._says_yes(f"{self._path}/ready") else Health.NO_MODEL
            return Health.LOADING if await self._says_yes("/v2/health/live") else Health.SILENT
        except httpx.RequestError:
            return Health.SILENT

    async def _says_yes(self, path: str) -> bool:
        async with self._client().stream("GET", path, timeout=self._connect_timeout) as response:  # it may never end
            return response.status_code == httpx.codes.OK

    async def close(self) -> None:
        """Close the connections; requests still running on them are cancelled."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def body(request: Request) -> dict[str, Any]:
    """Return the JSON object that carries ``request``: lists for tensors of any length, single values for the rest.

    The trace context is in it, as parameters: Triton (2.51) hands no headers of ``generate_stream`` to the stages.
    """
    values = {name: given if INPUTS[name].dims == (-1,) else given[0] for name, given in request.inputs.items()}
    return ({"id": request.id} if request.id else {}) | values | dict(request.trace_context)


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream of server-sent events, each one line.

    Split at line feeds only: httpx's own lines also end at U+2028 and its like, which JSON text may hold as they are.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                yield line


def read_event(line: bytes) -> dict[str, list[Any]]:
    """Return the tensors of a line that begins with ``EVENT``, flattened.

    Raises:
        InflightError: the event is the server's error, or not an event of Triton's.
    """
    text = line.removeprefix(EVENT)
    try:
        event = dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise EngineFailure(f"an event of the stream is not a JSON object: {text[:80]!r}") from error
    if "error" in event:
        raise from_wire(str(event["error"]))
    return {name: value if isinstance(value, list) else [value] for name, value in event.items()}


def error_of(status: int, raw: bytes, retry_after: str | None = None) -> InflightError:
    """Return the error in a response's body: Triton's ``{"error": ...}``, as an event or not, or a proxy's text.

    ``retry_after``: the response's header of that name.
    """
    text = raw.decode(errors="replace").strip()
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text.removeprefix("data:"))["error"])
    error: InflightError
    if status == httpx.codes.BAD_GATEWAY:  # a proxy's server broke under the request
        error = ServerUnreachable(text, broke=True)
    elif status == httpx.codes.TOO_MANY_REQUESTS:
        error = QueueFull(text)
    else:
        error = from_wire(text, STATUS_OF_HTTP.get(status, "INTERNAL"))
    error.retry_after_s = seconds(retry_after)
    return error
