"""Preparing a request: one plain function reads its body, checks, renders and encodes it.

What grows with a request is done beside the event loop: a small request is prepared at once, a large one in a thread,
where it waits for others, and the largest in a process of their own, as is what a chat template takes long for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from inflight.gateway.body import check_type, parse_object
from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.requests import set_state, state_of
from inflight.gateway.sse import while_connected
from inflight.gateway.workers import HUGE, LARGE, off_loop
from inflight.text.template_budget import TakesLonger, at_once

_VALUE = 32
"""Bytes of a text that are as much work as one more value is, beside its own."""
_Result = TypeVar("_Result")
Work = Callable[[Request, Gateway, dict[str, Any]], _Result]
"""A function of a module, which another process may call: what the request says beside its body is all it knows."""


async def prepared(request: Request, work: Work[_Result], *, grows: bool = False) -> _Result:
    """Return what ``work`` makes of the object of JSON that a request's body is.

    Args:
        request: whose body has not been read.
        work: is called in any thread, or in another process.
        grows: whether a small body may be much work, too.

    Raises:
        ApiError: 415 for another content type, 400 for what is no such object; and what ``work`` raises.
        ClientGone: the client has left.
    """
    check_type(request)
    parts = [part async for part in request.stream() if part]
    body = parts[0] if len(parts) == 1 else b"".join(parts)  # a large one comes whole, and is not copied
    gateway, size = gateway_of(request), _size(body, grows)

    def prepare() -> _Result:
        return work(request, gateway, parse_object(body))

    def prepare_at_once() -> _Result:
        with at_once():
            return prepare()

    if len(body) < HUGE:
        try:
            if size < LARGE:
                return prepare_at_once()
            return await while_connected(request, off_loop(prepare_at_once, size))
        except TakesLonger:  # a chat template does
            size = max(size, HUGE)
    if gateway.fork_server is None:
        return await while_connected(request, off_loop(prepare, size))
    call = gateway.fork_server.call(_read, work, _scope(request), body)
    try:
        return await while_connected(request, off_loop(call.result, size))
    finally:
        call.end()


def _size(body: bytes, grows: bool) -> int:
    """Return how much work a body is, in bytes."""
    if len(body) >= HUGE:
        return len(body)
    return max(len(body) + _VALUE * body.count(b","), LARGE * grows)


def _scope(request: Request) -> Scope:
    """Return what a request says beside its body."""
    scope = {name: request.scope[name] for name in ("type", "method", "path", "headers")}
    set_state(scope, state_of(request))
    return scope


def _read(gateway: Gateway, work: Work[_Result], scope: Scope, body: bytes) -> _Result:
    """Return what ``work`` makes of a body, in a process that has but this request."""
    return work(Request(scope), gateway, parse_object(body))
