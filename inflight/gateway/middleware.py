"""What happens to every request before its endpoint, as plain ASGI, from the outside in.

``Requests`` gives it an id, counts it, and answers for every error; ``Keys`` asks for an API key; ``Admission`` bounds
how many run; ``BodyLimit`` bounds what is read of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.contract import CLIENT
from inflight.gateway.errors import RETRY_AFTER_S, STOPPING, ApiError, as_api_error, away
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
MOST_BODIES = 16
"""The bodies of all requests that run may have so many times ``max_body_bytes``, beside ``SMALL_BODY`` of each."""
SMALL_BODY = 64 << 10
"""Bytes of each body for which there is always room."""
SLOWEST_BODY = 16 << 10
"""Bytes that must come of a body in a second, beyond the first ``client_timeout_s``."""
LEFT = 499
"""The status under which a request is counted whose client left before its answer began."""
_BEARER = "bearer "


class Requests:
    """Id, log, metrics, and an answer to whatever is raised inside."""

    def __init__(
        self, app: ASGIApp, metrics: GatewayMetrics, route_of: Callable[[str], str], client_timeout_s: float
    ) -> None:
        """``route_of`` returns the label of a path; a client has ``client_timeout_s`` to take what waits for it."""
        self._app, self._metrics, self._route_of = app, metrics, route_of
        self._timeout_s = client_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = RequestState(new_id(), route=self._route_of(scope["path"]))
        set_state(scope, state)
        answer = _Answer(send, state, self._timeout_s)
        self._metrics.begin(state.route)
        try:
            await self._answer(scope, receive, answer)
        except (ClientGone, ClientDisconnect) as gone:
            await self._left(scope, state, gone)
        finally:
            self._end(scope, state, answer.status or LEFT)

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Answer, if only with an error. Raises ClientGone, ClientDisconnect."""
        try:
            if (given := Headers(scope=scope).get(REQUEST_ID)) is not None:
                answer.state.request_id = check_id(given)
            await self._app(scope, receive, answer)
        except (ClientGone, ClientDisconnect):
            raise
        except asyncio.CancelledError:  # the gateway stops, and the request has had its time
            await _answer_error(away(STOPPING), scope, receive, answer)
        except Exception as error:
            await _answer_error(error, scope, receive, answer)
            _let_go(error)

    async def _left(self, scope: Scope, state: RequestState, gone: Exception) -> None:
        self._metrics.disconnected(state.route)
        if isinstance(gone, SlowClient):
            self._metrics.slow_client(state.route)
            log.warning("request %s: its client reads too slowly and is disconnected", state.request_id)
        await abort(scope)
        _let_go(gone)

    def _end(self, scope: Scope, state: RequestState, status: int) -> None:
        self._metrics.end(state.route, status, state.seconds)
        level = logging.DEBUG if state.route in (HEALTH, METRICS) else logging.INFO
        line = f"{scope['method']} {state.route} {status} {state.seconds:.3f} s {state.request_id}"
        log.log(level, "%s", line, extra={"client": state.client})


@dataclass
class _Answer:
    """Sends on, as far as the client takes it, adds the request's id to the headers, and remembers the status."""

    send: Send
    state: RequestState
    timeout_s: float
    status: int = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.state.request_id
        try:
            async with asyncio.timeout(self.timeout_s):
                await self.send(message)
        except TimeoutError:
            raise SlowClient from None


def _let_go(error: Exception) -> None:
    """Let go of the frames that an error has passed, and all that they hold, such as a body.

    Some of them refer to the error, so all would stay until the garbage collector looks for circles.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


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
    """Asks every request but those for the health for an API key, where there are keys, and notes who the client is.

    Behind the door the client is who the door says: nobody else reaches this port but processes of this machine.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, behind_the_door: bool) -> None:
        self._app, self._keys, self._behind_the_door = app, keys, behind_the_door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on what may pass. Raises ApiError: 401."""
        if scope["type"] == "http" and scope["path"] != HEALTH:
            headers, state = Headers(scope=scope), state_of(scope)
            if self._keys is not None:
                state.client = _client(self._keys, headers)
            if self._behind_the_door:
                state.client = headers.get(CLIENT) or state.client
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


@dataclass(eq=False)
class _Body:
    """The body of a request that runs."""

    began: float
    """When its request came, in seconds of the monotonic clock."""
    taken: int = 0
    """Bytes that have come."""
    held: int = 0
    """Bytes that count with those of all other requests."""
    patience: asyncio.Timeout | None = None
    """What bounds the wait for the next part."""
    must_go: bool = False
    """Whether it has to make room for others."""

    @property
    def speed(self) -> float:
        """Bytes that come in a second."""
        return self.taken / max(1e-3, time.monotonic() - self.began)

    def end(self) -> None:
        """Have the request end that waits for the next part."""
        self.must_go = True
        if self.patience is not None and not self.patience.expired():
            self.patience.reschedule(0)


class BodyLimit:
    """Bounds the bytes of a body, however it is sent, the time between two parts of it, and the time of the whole.

    All bodies together have ``MOST_BODIES`` times the bytes of one, beside the first ``SMALL_BODY`` of each. Beyond
    that, the one that comes the slowest of those that are not whole has to go; so nobody holds the others up with
    bodies that do not end.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s
        self._coming: set[_Body] = set()
        """Those that are not whole."""
        self._held = 0
        """Bytes of the bodies of all requests that run, beside the first ones of each."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on a request. Raises ApiError: 413, 408, or 503."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large()
        body, whole = _Body(time.monotonic()), False

        async def limited() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            whole = True
            return await self._whole(receive, body)

        try:
            await self._app(scope, limited, send)
        finally:
            self._release(body)

    async def _whole(self, receive: Receive, body: _Body) -> Message:
        """Return the body as one message, whatever parts it comes in; or that the client has left."""
        content = bytearray()
        self._coming.add(body)
        try:
            while (message := await self._part(receive, body))["type"] == "http.request":
                content += message.get("body", b"")
                self._take(body, len(content))
                if not message.get("more_body"):
                    return {"type": "http.request", "body": content, "more_body": False}
            return message
        finally:
            self._coming.discard(body)

    async def _part(self, receive: Receive, body: _Body) -> Message:
        """Return the next part."""
        left_s = self._timeout_s + body.taken / SLOWEST_BODY - (time.monotonic() - body.began)
        try:
            async with asyncio.timeout(min(left_s, self._timeout_s)) as body.patience:
                return await receive()
        except TimeoutError:
            raise self._too_many() if body.must_go else self._too_slow() from None

    def _take(self, body: _Body, taken: int) -> None:
        """Count what has come of a body, and make room for it."""
        if body.must_go:
            raise self._too_many()
        if taken > self._max_bytes:
            raise self._too_large()
        self._release(body)
        body.taken, body.held = taken, max(0, taken - SMALL_BODY)
        self._held += body.held
        while self._held > MOST_BODIES * self._max_bytes:
            slowest = min((one for one in self._coming if one.held), key=lambda one: one.speed)
            self._release(slowest)
            if slowest is body:
                raise self._too_many()
            slowest.end()

    def _release(self, body: _Body) -> None:
        self._held -= body.held
        body.held = 0

    def _too_slow(self) -> ApiError:
        time_s = f"{self._timeout_s:g} s (gateway.client_timeout_s)"
        message = f"the body comes too slowly: each part has {time_s}, and all of it a second more for each "
        message += f"{SLOWEST_BODY} bytes"
        return ApiError(408, message, code="request_timeout", headers={"connection": "close"})

    def _too_many(self) -> ApiError:
        limit = MOST_BODIES * self._max_bytes
        message = f"the bodies of the requests under way have more than {limit} bytes ({MOST_BODIES} times "
        message += "gateway.max_body_bytes), and of those that are not whole this one came the slowest"
        return ApiError(503, message, code="too_many_requests", headers={"retry-after": str(RETRY_AFTER_S)})

    def _too_large(self) -> ApiError:
        message = f"the body has more than {self._max_bytes} bytes (gateway.max_body_bytes)"
        return ApiError(413, message, code="request_too_large")
