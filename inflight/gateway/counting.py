"""What the gateway's metrics say of answers, counted as these are made."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.requests import Request

from inflight.gateway.context import Gateway
from inflight.gateway.generation import ChoiceDelta, Job, run
from inflight.gateway.merging import AT_ONCE, merged
from inflight.gateway.requests import state_of


async def counted(request: Request, gateway: Gateway, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
    """Generate, yield the deltas, and count the first token and all tokens of the request.

    Raises:
        ApiError: the engine's error, by the names of the request's fields.
    """
    counts = _Counts(request, gateway)
    try:
        async with aclosing(counts.deltas(job)) as deltas:
            async for delta in deltas:
                yield delta
    finally:
        counts.end()


async def counted_all(
    request: Request, gateway: Gateway, jobs: Sequence[Job]
) -> AsyncGenerator[tuple[int, ChoiceDelta], None]:
    """Generate for several prompts of one request, as ``counted``; each delta comes with the number of its prompt."""
    counts = _Counts(request, gateway)
    try:
        async with aclosing(merged([counts.deltas(job) for job in jobs], AT_ONCE)) as deltas:
            async for number, delta in deltas:
                yield number, delta
    finally:
        counts.end()


class _Counts:
    """The tokens of one request, of all its prompts and choices, and when the first of them was made.

    The first token of a stream counts when it comes. An answer that is not streamed comes whole, and the engine says
    when it made the first token.
    """

    def __init__(self, request: Request, gateway: Gateway) -> None:
        self._state, self._gateway = state_of(request), gateway
        self._first: float | None = None
        """Seconds from the request's arrival to its first token, as far as it is known."""
        self._counted = False
        """Whether the first token has been counted."""
        self._tokens = 0

    async def deltas(self, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
        """Generate for one prompt."""
        called, tokens = self._state.seconds, 0
        async with aclosing(run(self._gateway, job)) as deltas:
            async for delta in deltas:
                if job.request.stream and delta.token_ids and not self._counted:
                    self._first = self._state.seconds
                    self._count_first()
                if delta.first_token_s is not None:
                    self._first = min(self._first or math.inf, called + delta.first_token_s)
                self._tokens += max(0, delta.usage.completion_tokens - tokens)
                tokens = max(tokens, delta.usage.completion_tokens)
                yield delta

    def end(self) -> None:
        """Count what there is at the end of the request."""
        if self._first is not None and not self._counted:
            self._count_first()
        self._gateway.metrics.output_tokens(self._state.route, self._tokens)

    def _count_first(self) -> None:
        assert self._first is not None
        self._counted = True
        self._gateway.metrics.first_token(self._state.route, self._first)
