"""What a server tells of the model that it serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from inflight.client.answer import Outputs
from inflight.client.request import Request
from inflight.errors import InflightError

_PATIENCE_S = 2.0


class EngineTransport(Protocol):
    """What is needed of a transport to the engine's model."""

    def replies(self, request: Request) -> AsyncGenerator[Outputs, None]:
        """Send ``request`` and yield its responses."""

    async def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a deployment."""

    name: str
    max_sequence_length: int | None
    """Tokens of prompt and answer together; None: the engine has no limit."""
    default_max_tokens: int
    """Of an answer, where a request does not say."""


async def served_model(engine: EngineTransport) -> ServedModel | None:
    """Return what the server says of its model; None if it does not tell (``observability.inspection``)."""
    try:
        return await asyncio.wait_for(_ask(engine), _PATIENCE_S)
    except (TimeoutError, InflightError, LookupError, TypeError, ValueError):
        return None
    finally:
        await engine.close()


async def _ask(engine: EngineTransport) -> ServedModel:
    # To the call's end: one that is left right after its answer can stay with Triton (2.51), and hold up its stop.
    answers = [outputs async for outputs in engine.replies(Request({"inspect": [True]}))]
    return ServedModel(**json.loads(answers[0]["snapshot"][0])["model"])
