"""What happens to every request before its endpoint, as plain ASGI, from the outside in.

``Requests`` gives it an id, counts it, and answers for every error; ``Keys`` asks for an API key; ``Admission`` bounds
how many run; ``BodyLimit`` bounds what is read of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.gateway.errors import STOPPING, ApiError, as_api_error, away
from inflight.gateway.keys import ApiKeys
from inflight.gateway.load import Load
from inflight.gateway.messages.errors import PATH as MESSAGES
from inflight.gateway.messages.errors import message_error_response
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.requests import RequestState, check_id, new_id, set_state, state_of
from inflight.gateway.sse import ClientGone, SlowClient

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
HEALTH, METRICS = "/health", "/metrics"
LEFT = 499
"""The status under which a request is counted whose client left before its answer began."""
_BEARER = "bearer "


class Requests:
    """Id, log, metrics, and an answer to whatever is raised inside."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, route_of: Callable[[str], str]) -> None:
        """``route_of`` returns the label of a path."""
        self._app, self._metrics, self._route_of = app, metrics, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = RequestState(new_id(), route=self._route_of(scope["path"]))
        set_state(scope, state)
        answer = _Answer(send, state)
        self._metrics.begin(state.route)
        try:
            if (given := Headers(scope=scope).get(REQUEST_ID)) is not None:
                state.request_id = check_id(given)
            await self._app(scope, receive, answer)
        except (ClientGone, ClientDisconnect) as gone:
            await self._left(scope, state, gone)
        except asyncio.CancelledError:  # the gateway stops, and the request has had its time
            await _answer_error(away(STOPPING), scope, receive, answer)
        except Exception as error:
            await _answer_error(error, scope, receive, answer)
        finally:
            self._end(scope, state, answer.status or LEFT)

    async def _left(self, scope: Scope, state: RequestState, gone: Exception) -> None:
        self._metrics.disconnected(state.route)
        if isinstance(gone, SlowClient):
            self._metrics.slow_client(state.route)
            log.warning("request %s: its client reads too slowly and is disconnected", state.request_id)
        await abort(scope)

    def _end(self, scope: Scope, state: RequestState, status: int) -> None:
        self._metrics.end(state.route, status, state.seconds)
        level = logging.DEBUG if state.route in (HEALTH, METRICS) else logging.INFO
        log.log(level, "%s %s %d %.3f s %s", scope["method"], state.route, status, state.seconds, state.request_id)


@dataclass
class _Answer:
    """Sends on, adds the request's id to the headers, and remembers the status."""

    send: Send
    state: RequestState
    status: int = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.state.request_id
        await self.send(message)


async def _answer_error(error: Exception, scope: Scope, receive: Receive, answer: _Answer) -> None:
    told = as_api_error(error)
    if told.status == 500:
        log.error("request %s failed", answer.state.request_id, exc_info=error)
    if answer.status:  # too late for another answer: the client sees that this one is not whole
        await abort(scope)
    else:
        await _response(told, scope["path"], answer.state.request_id)(scope, receive, answer)


def _response(error: ApiError, path: str, request_id: str) -> Response:
    """Return the response of an error, in the shape that the clients of a path read."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return message_error_response(error, request_id)
    return error.response()


async def abort(scope: Scope) -> None:
    """Close a request's connection at once, without what its client has not taken."""
    close: Callable[[], None] | None = scope.get("state", {}).get("abort")
    if close is not None:
        close()
        await asyncio.sleep(0)  # so that the protocol learns of it before the request ends
        await asyncio.sleep(0)


class Keys:
    """Asks every request but those for the health for an API key, where there are keys."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass. Raises ApiError: 401."""
        if self._keys is not None and scope["type"] == "http" and scope["path"] != HEALTH:
            state_of(scope).client = _client(self._keys, Headers(scope=scope))
        await self._app(scope, receive, send)


def _client(keys: ApiKeys, headers: Headers) -> str:
    """Return the client's name. Either header will do: OpenAI's clients send the first, Anthropic's the second."""
    bearer, key = headers.get("authorization", ""), headers.get("x-api-key", "")
    given = [bearer[len(_BEARER) :].strip() if bearer.lower().startswith(_BEARER) else "", key]
    for one in filter(None, given):
        if (client := keys.client_of(one)) is not None:
            return client
    said = "the API key is not known" if any(given) else "there is no API key"
    raise ApiError(
        401,
        f"{said}; send one as `authorization: Bearer KEY` or `x-api-key: KEY`",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


class Admission:
    """Bounds how many requests run at once; those for the health and the metrics are always answered."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app, self._load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what has a place. Raises ApiError: 503."""
        if scope["type"] != "http" or scope["path"] in (HEALTH, METRICS):
            await self._app(scope, receive, send)
            return
        with self._load.one_more():
            await self._app(scope, receive, send)


class BodyLimit:
    """Bounds the bytes of a body, however it is sent, and the time between two parts of it."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on a request. Raises ApiError: 413, or 408."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        taken, more = 0, True

        async def limited() -> Message:
            nonlocal taken, more
            if not more:
                return await receive()
            message = await self._part(receive)
            more = bool(message.get("more_body"))
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    async def _part(self, receive: Receive) -> Message:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await receive()
        except TimeoutError:
            message = f"no part of the body has come for {self._timeout_s:g} s (gateway.client_timeout_s)"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._max_bytes} bytes (gateway.max_body_bytes)"
        return ApiError(413, message, code="request_too_large")
