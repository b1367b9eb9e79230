"""Several streams as one: what comes first is first, and all of them end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import TypeVar

AT_ONCE = 64
"""Prompts of one request that the engine has at once."""
_Item = TypeVar("_Item")


async def merged(
    streams: Sequence[AsyncGenerator[_Item, None]], at_once: int
) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yield what comes of each stream, with its number; closing the generator closes all of them.

    Args:
        streams: they are begun in their order, and ``at_once`` of them run at once.
        at_once: at least 1.

    Raises:
        Exception: the first that a stream raises; the others are closed.
    """
    # Bounded, so that whoever reads this slowly holds up the streams, and not their items.
    queue: asyncio.Queue[tuple[int, _Item] | Exception | None] = asyncio.Queue(at_once)
    room = asyncio.Semaphore(at_once)

    async def read(number: int, stream: AsyncGenerator[_Item, None]) -> None:
        try:
            async with room, aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        ended = 0
        while ended < len(tasks):
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
