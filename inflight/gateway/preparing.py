"""Preparing a request: one plain function reads its body, checks, renders and encodes it.

The event loop's thread serves the streams of all clients, so what grows with a request is done beside it. A large
request is prepared in one of two threads, where it waits for other large ones; a small one is prepared at once. More
threads would not prepare faster, since one of them at a time runs Python, and they would hold up the event loop's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import Request

from inflight.gateway.body import check_type, parse_object
from inflight.gateway.sse import while_connected

LARGE = 16 << 10
"""Bytes of a body, or pieces of an answer, from which on the work takes milliseconds."""
_VALUE = 32
"""Bytes of a text that are as much work as one more value is, beside its own."""
_AT_ONCE = 256
"""Elements of a list that are written by one call, which holds all threads up."""
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="prepare")
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
    body = await request.body()
    size = max(len(body) + _VALUE * body.count(b","), LARGE * grows)
    if size < LARGE:
        return work(parse_object(body))
    return await while_connected(request, off_loop(lambda: work(parse_object(body)), size))


async def off_loop(work: Callable[[], _Result], size: int) -> _Result:
    """Return what ``work`` does for ``size`` bytes or pieces: in another thread where there are many."""
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


def written(value: Any) -> str:
    """Return a value as JSON in one line, written by many short calls where its lists are long."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{written(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and len(value) > _AT_ONCE:
        parts = (_json(value[first : first + _AT_ONCE])[1:-1] for first in range(0, len(value), _AT_ONCE))
        return "[" + ",".join(parts) + "]"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
