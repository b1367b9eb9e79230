"""What the gateway's metrics say of answers, counted as these are made."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from inflight.gateway.context import Gateway
from inflight.gateway.generation import ChoiceDelta, Job, run
from inflight.gateway.requests import state_of


async def counted(request: Request, gateway: Gateway, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
    """Generate, yield the deltas, and count the first token and all tokens of an answer.

    The first token of a stream counts when it comes. An answer that is not streamed comes whole, and the engine says
    when it made the first token.

    Raises:
        ApiError: the engine's error, by the names of the request's fields.
    """
    state, tokens = state_of(request), 0
    called, first = state.seconds, None
    try:
        async with aclosing(run(gateway, job)) as deltas:
            async for delta in deltas:
                if job.request.stream and delta.token_ids and not tokens:
                    gateway.metrics.first_token(state.route, state.seconds)
                if delta.first_token_s is not None:
                    first = min(first or math.inf, called + delta.first_token_s)
                tokens = max(tokens, delta.usage.completion_tokens)
                yield delta
    finally:
        if first is not None:
            gateway.metrics.first_token(state.route, first)
        gateway.metrics.output_tokens(state.route, tokens)
