"""A load of requests of every kind, one after the other from each client, while servers are updated under it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from benchmarks.faults.openai import chat, model_name, streamed_texts, whole_text
from inflight.client import AsyncClient, AsyncHttpClient, Retry
from inflight.client.request import GenerateOptions
from inflight.errors import InflightError

_QUESTIONS = ("What is in-flight batching?", "What is a paged KV cache?", "How does a scheduler choose?")
_WHOLE, _STREAM = 24, 200
_SAMPLED = {"temperature": 0.8, "seed": 7}
_PATIENCE_S, _PAUSE_S = 120.0, 0.05
_REASON = 120

Ask = Callable[[str], Awaitable[str]]
"""Asks a question and returns the text of the answer."""


@dataclass
class Load:
    """Clients of one address, and what they have seen."""

    address: str
    resume: bool
    """Whether the clients over gRPC resume; otherwise no client tries anything again."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests by kind that ended with an error, or with another text than the first answer to their question."""
    reasons: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    """The longest that a request took to its end."""
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        """Ask on, with so many clients of each kind, until the end of the context; all requests end then."""
        once = Retry(attempts=1)
        async with (
            AsyncHttpClient(self.address, retry=once) as http,
            AsyncClient(self.address, retry=Retry(resume=True) if self.resume else once) as grpc,
            httpx.AsyncClient(base_url=f"http://{self.address}", timeout=_PATIENCE_S, trust_env=False) as openai,
        ):
            asks = _asks(http, grpc, openai, await model_name(openai))
            for kind, ask in asks.items():  # while nothing happens
                self._texts |= {(kind, question): await ask(question) for question in _QUESTIONS}
            tasks = [asyncio.create_task(self._ask_on(*one, place)) for one in asks.items() for place in range(clients)]
            try:
                yield
            finally:
                self._over.set()
                await asyncio.gather(*tasks)

    async def _ask_on(self, kind: str, ask: Ask, place: int) -> None:
        while not self._over.is_set():
            question, began = _QUESTIONS[place % len(_QUESTIONS)], time.monotonic()
            place += 1
            self.asked[kind] += 1
            if reason := await self._fault(kind, ask, question):
                self.failed[kind] += 1
                self.reasons[f"{kind}: {reason}"] += 1
                await asyncio.sleep(_PAUSE_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    async def _fault(self, kind: str, ask: Ask, question: str) -> str:
        try:
            text = await ask(question)
        except (InflightError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0][:_REASON]
        return "" if text == self._texts[kind, question] else "another text"


def _asks(http: AsyncHttpClient, grpc: AsyncClient, openai: httpx.AsyncClient, model: str) -> dict[str, Ask]:
    """Return the kinds of requests."""

    async def kserve_whole(question: str) -> str:
        return (await http.generate(question, GenerateOptions(max_tokens=_WHOLE, ignore_eos=True))).text

    async def grpc_stream(question: str) -> str:
        options = GenerateOptions(max_tokens=_STREAM, ignore_eos=True, temperature=0.8, seed=7)
        async with grpc.stream(question, options) as stream:
            return "".join([chunk.text async for chunk in stream])

    async def openai_whole(question: str) -> str:
        return await whole_text(openai, chat(model, question, _WHOLE, **_SAMPLED))

    async def openai_stream(question: str) -> str:
        return "".join([text async for text in streamed_texts(openai, chat(model, question, _STREAM, **_SAMPLED))])

    return {
        "KServe over HTTP": kserve_whole,
        "gRPC streams": grpc_stream,
        "OpenAI": openai_whole,
        "OpenAI, SSE": openai_stream,
    }
