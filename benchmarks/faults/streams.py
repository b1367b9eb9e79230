"""The streams that run when a fault comes, and the questions by which a server shows that it answers again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from benchmarks.faults.openai import chat, model_name, streamed_texts, whole_text
from benchmarks.faults.served import Served
from inflight.client import AsyncClient, Retry, Timeouts
from inflight.client.request import GenerateOptions
from inflight.errors import EngineFailure, InflightError

WHOLE = "whole"
GRPC, OPENAI = "gRPC", "OpenAI"
TOKENS = 600
_QUESTIONS = (
    "What is in-flight batching?",
    "Why does time to first token matter?",
    "What is a paged KV cache?",
    "How does a scheduler choose?",
)
_TEMPERATURE = 0.8
_ASK_S, _EACH_S, _SILENCE_S = 20.0, 0.3, 120.0
_START_S = 240.0
_SHORT = 4
_TRIES = 5
_REFUSALS = (InflightError, httpx.HTTPError)


@dataclass
class Seen:
    """What a client has seen of its stream."""

    text: str = ""
    at: list[float] = field(default_factory=list)
    """When each chunk came."""
    end: str = ""
    """``WHOLE``, or the kind of error; empty: none yet."""
    error: str = ""
    """The error's message."""
    runs: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, text: str) -> None:
        """Take note of a chunk."""
        self.text += text
        self.at.append(time.monotonic())
        self.runs.set()


class Clients:
    """The clients of one server: half of the streams use gRPC and resume, half are OpenAI's, through the gateway."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._grpc = AsyncClient(served.grpc, retry=Retry(resume=True), timeouts=Timeouts(between_chunks=_SILENCE_S))
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"http://{served.gateway}", timeout=_SILENCE_S, trust_env=False, limits=limits
        )
        self._model = ""

    async def __aenter__(self) -> Clients:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._grpc.close()
        await self._http.aclose()

    async def wait_ready(self) -> None:
        """Wait until both ways answer.

        Raises:
            InflightError: they do not; what the server has said is in the message.
        """
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.gather(self.good_grpc_answer(), self.good_openai_answer())
        except TimeoutError:
            raise EngineFailure(f"the server does not answer: {self._served.said.read_text()[-500:]}") from None

    async def run(self, place: int, seen: Seen) -> None:
        """Run the stream of this number to its end; even numbers go over gRPC, and of both two in four are sampled."""
        read, way = (self._read_grpc, GRPC) if place % 2 == 0 else (self._read_openai, OPENAI)
        try:
            await read(place, seen)
            seen.end = WHOLE
        except _REFUSALS as error:
            seen.end, seen.error = f"{way}: {type(error).__name__}", str(error)
        seen.runs.set()

    async def _read_grpc(self, place: int, seen: Seen) -> None:
        seed, temperature = (place, _TEMPERATURE) if place % 4 >= 2 else (None, None)
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, seed=seed)
        async with self._grpc.stream(_question(place), options) as stream:
            async for chunk in stream:
                seen.add(chunk.text)

    async def _read_openai(self, place: int, seen: Seen) -> None:
        temperature = _TEMPERATURE if place % 4 >= 2 else 0.0
        body = chat(self._model, _question(place), TOKENS, temperature=temperature, seed=place)
        async for text in streamed_texts(self._http, body):
            seen.add(text)

    async def good_grpc_answer(self) -> float:
        """Return when a whole answer came over gRPC; each question has a connection of its own."""

        async def ask() -> None:
            limits = Timeouts(total=_ASK_S)
            async with AsyncClient(self._served.grpc, retry=Retry(attempts=1), timeouts=limits) as client:
                await client.generate(_QUESTIONS[0], GenerateOptions(max_tokens=_SHORT))

        return await _first_good(ask)

    async def good_openai_answer(self) -> float:
        """Return when a whole answer came through the gateway; each question has a connection of its own."""

        async def ask() -> None:
            async with httpx.AsyncClient(
                base_url=f"http://{self._served.gateway}", timeout=_ASK_S, trust_env=False
            ) as client:
                self._model = await model_name(client)
                await whole_text(client, chat(self._model, _QUESTIONS[0], _SHORT))

        return await _first_good(ask)


def _question(place: int) -> str:
    return f"{_QUESTIONS[place % len(_QUESTIONS)]} ({place})"


async def _first_good(ask: Callable[[], Awaitable[None]]) -> float:
    """Ask anew every some tenths of a second, whether or not those before have been answered, until one was."""
    asked: set[asyncio.Task[float]] = set()

    async def one() -> float:
        await ask()
        return time.monotonic()

    try:
        while True:
            asked.add(asyncio.create_task(one()))
            done, asked = await asyncio.wait(asked, timeout=_EACH_S)
            if good := [task.result() for task in done if not isinstance(task.exception(), _REFUSALS)]:
                return good[0]
            if done:
                await asyncio.sleep(_EACH_S)
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def start_all(clients: Clients, count: int) -> tuple[Sequence[Seen], Sequence[asyncio.Task[None]]]:
    """Start so many streams; return what is seen of each, and its task."""
    seen = [Seen() for _ in range(count)]
    return seen, [asyncio.create_task(clients.run(place, one)) for place, one in enumerate(seen)]


async def have_all_run(clients: Clients, count: int) -> tuple[Sequence[Seen], Sequence[asyncio.Task[None]]]:
    """Start streams, and return them when each has had a chunk and none has ended.

    On a machine that is far too busy one may come to its end before another has begun. Others are then started, once
    all have ended.

    Raises:
        EngineFailure: one has ended with an error, or one before the others ran each time.
    """
    for _ in range(_TRIES):
        seen, tasks = start_all(clients, count)
        await asyncio.gather(*(one.runs.wait() for one in seen))
        ended = {one.end for one in seen if one.end}
        if not ended:
            return seen, tasks
        await asyncio.gather(*tasks)
        if ended != {WHOLE}:
            break
    raise EngineFailure(f"a stream ended before all of them ran: {', '.join(sorted(ended))}")
