"""Preparing a request: one plain function reads its body, checks, renders and encodes it.

What grows with a request is done beside the event loop: a large request is prepared in a thread, where it waits for
others, and a small one at once, unless the chat template takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from inflight.gateway.body import check_type, parse_object
from inflight.gateway.sse import while_connected
from inflight.gateway.workers import HUGE, LARGE, off_loop
from inflight.text.template_budget import TakesLonger, at_once

_VALUE = 32
"""Bytes of a text that are as much work as one more value is, beside its own."""
_Result = TypeVar("_Result")


async def prepared(request: Request, work: Callable[[dict[str, Any]], _Result], *, grows: bool = False) -> _Result:
    """Return what ``work`` makes of the object of JSON that a request's body is.

    Args:
        request: whose body has not been read.
        work: is called in any thread.
        grows: whether a small body may be much work, too.

    Raises:
        ApiError: 415 for another content type, 400 for what is no such object; and what ``work`` raises.
        ClientGone: the client has left.
    """
    check_type(request)
    parts = [part async for part in request.stream() if part]
    body = parts[0] if len(parts) == 1 else b"".join(parts)  # a large one comes whole, and is not copied
    size = max(len(body) + _VALUE * body.count(b","), LARGE * grows)
    if size < LARGE:
        try:
            with at_once():
                return work(parse_object(body))
        except TakesLonger:  # a chat template does
            size = HUGE
    return await while_connected(request, off_loop(lambda: work(parse_object(body)), size))
