"""The same streams by three paths in turn: the gateway, the ensemble over gRPC, and the engine's model over gRPC.

The gateway asks the engine's model with token ids; the difference between the last two paths is what it would cost to
ask the ensemble instead. Everything runs on this machine, clients included, which are counted apart.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import psutil

from benchmarks.gateway.served import Served
from benchmarks.pipeline import PROMPT
from inflight.client import AsyncClient, GenerateOptions
from inflight.errors import EngineFailure
from inflight.gateway.engine_client import EngineClient, GenerateRequest

GATEWAY, ENSEMBLE, ENGINE = "gateway", "ensemble", "engine's model"
PATHS = (GATEWAY, ENSEMBLE, ENGINE)
TOKENS, PROMPT_WORDS, _PROMPT_IDS = 128, 60, 90
_IDS = range(20, 4000)
_draw = Random(0)


@dataclass
class Seen:
    """What the clients saw by one path in one round."""

    tokens: int = 0
    first_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """One path in one round."""

    path: str
    round: int
    tokens_per_second: float
    ttft_ms_p50: float
    server_us_per_token: float
    """CPU of Triton, its stages and the gateway."""
    gateway_us_per_token: float
    client_us_per_token: float


Ask = Callable[[Seen], Awaitable[None]]


def measure(served: Served, streams: int, rounds: int, seconds: float) -> Iterator[Measured]:
    """Measure each path in each round, beginning with another one each time, after a short run of each.

    Raises:
        EngineFailure: an answer is not as long as it has to be.
    """
    for path in PATHS:
        asyncio.run(run(served, path, streams, 1.0))
    for number in range(rounds):
        for index in range(len(PATHS)):
            yield _one(served, PATHS[(number + index) % len(PATHS)], number, streams, seconds)


def _one(served: Served, path: str, number: int, streams: int, seconds: float) -> Measured:
    before, own, began = _cpu(served), time.process_time(), time.monotonic()
    seen = asyncio.run(run(served, path, streams, seconds))
    elapsed, own = time.monotonic() - began, time.process_time() - own
    server, gateway = (after - first for after, first in zip(_cpu(served), before, strict=True))
    per_token = 1e6 / seen.tokens
    return Measured(
        path=path,
        round=number,
        tokens_per_second=round(seen.tokens / elapsed),
        ttft_ms_p50=round(statistics.median(seen.first_ms), 1),
        server_us_per_token=round(server * per_token, 1),
        gateway_us_per_token=round(gateway * per_token, 1),
        client_us_per_token=round(own * per_token, 1),
    )


def _cpu(served: Served) -> tuple[float, float]:
    """Return the CPU seconds so far of all that serves, and of the gateway alone."""
    root = psutil.Process(served.server.process.pid)
    triton = sum(cpu_seconds(one) for one in [root, *root.children(recursive=True)])
    gateway = cpu_seconds(psutil.Process(served.gateway.process.pid))
    return triton + gateway, gateway


def cpu_seconds(process: psutil.Process) -> float:
    """Return the seconds of the processor that a process has used."""
    times = process.cpu_times()
    return times.user + times.system


async def run(served: Served, path: str, streams: int, seconds: float) -> Seen:
    """Run the streams, each client one request after the other, until the time is over."""
    seen, deadline = Seen(), time.monotonic() + seconds
    begin = {GATEWAY: _by_gateway, ENSEMBLE: _by_ensemble, ENGINE: _by_engine}[path]

    async def work(ask: Ask) -> None:
        while time.monotonic() < deadline:
            await ask(seen)

    async for ask in begin(served):
        await asyncio.gather(*(work(ask) for _ in range(streams)))
    return seen


def _prompt() -> str:
    return " ".join(_draw.choices(PROMPT.split(), k=PROMPT_WORDS))


async def _by_gateway(served: Served) -> Any:
    host, _, port = served.url.removeprefix("http://").rpartition(":")

    async def ask(seen: Seen) -> None:
        body = {
            "model": served.gateway.model_name,
            "prompt": _prompt(),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content, began, first = json.dumps(body).encode(), time.monotonic(), True
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
        )
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + content)
        last = b""
        async for line in reader:
            if line.startswith(b"data: {"):
                if first:
                    seen.first_ms.append(1000 * (time.monotonic() - began))
                last, first = line, False
        writer.close()
        _count(seen, json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"] if last else 0)

    yield ask


async def _by_ensemble(served: Served) -> Any:
    async with AsyncClient(served.grpc) as client:

        async def ask(seen: Seen) -> None:
            began, first, reason = time.monotonic(), True, None
            options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)
            async with client.stream(_prompt(), options) as stream:
                async for chunk in stream:
                    if first:
                        seen.first_ms.append(1000 * (time.monotonic() - began))
                    first, reason = False, chunk.finish_reason or reason
            _count(seen, TOKENS if reason == "length" else 0)

        yield ask


async def _by_engine(served: Served) -> Any:
    client = EngineClient(served.grpc)

    async def ask(seen: Seen) -> None:
        began, tokens = time.monotonic(), 0
        request = GenerateRequest(prompt=_draw.choices(_IDS, k=_PROMPT_IDS), max_tokens=TOKENS)
        async for delta in client.generate(request):
            if not tokens:
                seen.first_ms.append(1000 * (time.monotonic() - began))
            tokens += len(delta.tokens)
        _count(seen, tokens)

    yield ask
    await client.close()


def _count(seen: Seen, tokens: int) -> None:
    if tokens != TOKENS:
        raise EngineFailure(f"an answer has {tokens} tokens in place of {TOKENS}")
    seen.tokens += tokens


def ratios(rows: Sequence[Measured], path: str, base: str) -> list[float]:
    """Return for each round the tokens per second of a path over those of another."""
    rates = {(row.path, row.round): row.tokens_per_second for row in rows}
    return [rates[path, row.round] / row.tokens_per_second for row in rows if row.path == base]
