"""Cors: cross-origin requests of browsers, from listed origins alone. Without a list it does nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.gateway.errors import ApiError

_EXPOSED = "x-request-id, x-ignored-fields, retry-after, x-should-retry"
_METHODS = "GET, POST"
_PREFLIGHT_S = 600
"""How long a browser may keep the answer to a preflight request."""
_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,2000}", re.ASCII)


class Cors:
    """The outermost part of the application: browsers may read errors, too."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app, self._origins = app, frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request; add the headers to the answer of any other request with an origin."""
        headers = Headers(scope=scope) if scope["type"] == "http" and self._origins else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        allowed = not self._origins.isdisjoint(("*", origin))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, allowed)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                found.add_vary_header("origin")
                if allowed:
                    found["access-control-allow-origin"] = origin
                    found["access-control-expose-headers"] = _EXPOSED
            await send(message)

        await self._app(scope, receive, with_headers)


def _preflight(headers: Headers, allowed: bool) -> Response:
    asked = headers.get("access-control-request-headers", "")
    if not allowed or not _NAMES.fullmatch(asked):
        return ApiError(403, "requests from this origin are not allowed", code="origin_not_allowed").response()
    answer = {
        "access-control-allow-origin": headers["origin"],
        "access-control-allow-methods": _METHODS,
        "access-control-max-age": str(_PREFLIGHT_S),
        "vary": "origin, access-control-request-headers",
    }
    return Response(status_code=204, headers=answer | ({"access-control-allow-headers": asked} if asked else {}))
