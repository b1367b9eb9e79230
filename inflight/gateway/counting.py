"""What the gateway's metrics say of answers, counted as these are made."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from inflight.gateway.context import Gateway
from inflight.gateway.generation import ChoiceDelta
from inflight.gateway.requests import state_of


async def counted(
    request: Request, gateway: Gateway, deltas: AsyncGenerator[ChoiceDelta, None]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Yield the deltas, and count the first token and all tokens of an answer."""
    state, tokens = state_of(request), 0
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                if delta.token_ids and not tokens:
                    gateway.metrics.first_token(state.route, state.seconds)
                tokens = max(tokens, delta.usage.completion_tokens)
                yield delta
    finally:
        gateway.metrics.output_tokens(state.route, tokens)
