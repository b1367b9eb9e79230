"""Clients that outlive crashes: Inflight's own, which resume, and a plain one of the gateway, which does it itself."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from random import Random
from typing import Any

import httpx

from benchmarks.server_soak.session import WRONG, Clients, End
from benchmarks.server_soak.traffic import Ask
from inflight.client import Retry, Timeouts
from inflight.client.aio import AsyncStream, Patience
from inflight.client.answer import Chunk, Collector

CHAT = "gateway chat"
TYPED = "typed error"
"""The end of a request that cannot be resumed, and was broken."""
_NOT_RESUMED = ("logits",)
"""Kinds of requests that stream and cannot be resumed: see docs/resuming.md."""
_RETRY = Retry(attempts=20, longest_pause=2.0, resume=True, longest_outage=90.0)
_TIMEOUTS = Timeouts(first_chunk=200.0, between_chunks=120.0)
_PATIENCE_S = 240.0
_MOST_TOKENS, _CHOICES = 200, 2
_TRIES = 10
"""How often a plain client asks that is told to come again: OpenAI's clients do so by themselves."""
_TOPICS = "paged caches,batches,a queue,streams,the scheduler,prefixes,latency,tokens".split(",")


class ResumingClients(Clients):
    """The connections of clients that resume."""

    async def send(self, ask: Ask) -> End:
        """Send a request and return how it ended; one that cannot be resumed may end with a typed error."""
        end = await super().send(ask)
        if end.how == WRONG and end.typed and ask.kind in _NOT_RESUMED:
            return End(TYPED, end.detail)
        return end

    async def _read(self, ask: Ask, collector: Collector, chunks: list[Chunk]) -> None:
        patience = Patience(_TIMEOUTS, stream=True)
        async with AsyncStream(self._transports[ask.over], ask.request, patience, _RETRY) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                collector.add(chunk)
                await self._dawdle(ask)


class GatewayClient:
    """A client of OpenAI's API that knows nothing of crashes, and comes again when it is asked to."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._http = httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, trust_env=False, limits=httpx.Limits())

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def send(self, random: Random) -> End:
        """Stream a chat to its end; every choice has to have one finish reason, and the stream its last event."""
        choices = random.choice([1, 1, 1, _CHOICES])
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"What about {' and '.join(random.choices(_TOPICS, k=5))}?"}],
            "max_completion_tokens": random.randint(1, _MOST_TOKENS),
            "temperature": random.choice([0, 0.8]),
            "n": choices,
            "stream": True,
        }
        for _ in range(_TRIES - 1):
            end, pause_s = await self._try(body, choices)
            if pause_s is None:
                return end
            await asyncio.sleep(pause_s)
        return (await self._try(body, choices))[0]

    async def _try(self, body: dict[str, Any], choices: int) -> tuple[End, float | None]:
        """Return how the answer ended, and in how many seconds the server asks to be asked again, if it does."""
        events: list[str] = []
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    again_s = response.headers.get("retry-after")
                    said = f"{response.status_code} {(await response.aread()).decode()[:500]}"
                    return End(WRONG, said, typed=True), float(again_s) if again_s else None
                events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        except httpx.HTTPError as error:
            return End(WRONG, f"{type(error).__name__}: {error}"), None
        return _end_of(events, choices), None


def _end_of(events: list[str], choices: int) -> End:
    """Return the end that the events of a stream tell of."""
    if not events or events[-1] != "[DONE]":
        return End(WRONG, f"the stream's last event is {events[-1][:500] if events else 'missing'}")
    told = [one for event in events[:-1] for one in json.loads(event)["choices"]]
    reasons = Counter((one["index"], one["finish_reason"]) for one in told if one["finish_reason"])
    if sorted(index for index, _ in reasons.elements()) != list(range(choices)):
        return End(WRONG, f"{choices} choices have the finish reasons {dict(reasons)}")
    return End(min(reason for _, reason in reasons))
