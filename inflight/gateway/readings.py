"""Prompts that the engine only reads, many at once: for embeddings, and for the log-probs of labels behind them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile

from inflight.errors import InflightError
from inflight.gateway.context import Gateway
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import invalid
from inflight.gateway.merging import AT_ONCE, merged
from inflight.gateway.request_errors import context_length_exceeded, request_error

_WORTH_WAITING = 128
"""Tokens that prompts begin with together, from which on the first one is read alone, so that the others find them in
the prefix cache."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One prompt."""

    request: GenerateRequest
    param: str
    """The field that it comes from, by its path."""


async def read_all(gateway: Gateway, readings: Sequence[Reading]) -> list[EngineDelta]:
    """Return what the engine says at the end of each prompt, in their order.

    Raises:
        ApiError: of the first prompt that fails; the others are cancelled.
    """
    for one in readings:
        _check_length(gateway, one)
    alone = 1 if gateway.deployment.kv_cache.prefix_reuse and _common(readings) >= _WORTH_WAITING else 0
    found: dict[int, EngineDelta] = {}
    for first, part in ((0, readings[:alone]), (alone, readings[alone:])):
        if not part:
            continue
        async with aclosing(merged([_last(gateway, one) for one in part], AT_ONCE)) as deltas:
            async for number, delta in deltas:
                found[first + number] = delta
    return [found[number] for number in range(len(readings))]


def _check_length(gateway: Gateway, reading: Reading) -> None:
    """Raise ApiError for a prompt that is empty, or too long for the context."""
    size, longest = len(reading.request.prompt), gateway.max_model_len
    if not size:
        raise invalid(f"{reading.param} has no token; it must have at least one", reading.param)
    room = 0 if reading.request.pooling else 1
    if longest is not None and size + room > longest:
        raise context_length_exceeded(longest, size, reading.param, room)


def _common(readings: Sequence[Reading]) -> int:
    """Return how many tokens all prompts begin with, up to those that are worth waiting for, if there are several."""
    if len(readings) < 2:
        return 0
    beginnings = [one.request.prompt[:_WORTH_WAITING] for one in readings]
    columns = zip(*beginnings, strict=False)  # up to the end of the shortest
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


async def _last(gateway: Gateway, reading: Reading) -> AsyncGenerator[EngineDelta, None]:
    """Yield the last delta of a prompt."""
    try:
        async with aclosing(gateway.engine.generate(reading.request)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is not None:
                    yield delta
    except InflightError as error:
        raise request_error(error, reading.param) from error
