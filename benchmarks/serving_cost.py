"""Measures what serving costs: the CPU time of each process for a streamed token, beside what the engine computes.

The server and the ensemble are the real ones. The replay engine keeps time like a real one and computes nothing; the
portable engine computes a Llama shape with random weights. The clients run in this process, on the same cores, and are
counted apart.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import yaml

from benchmarks.pipeline import PROMPT, serve
from inflight.client import AsyncClient, AsyncHttpClient, GenerateOptions
from inflight.contract import DETOKENIZER, ENGINE, TOKENIZER
from inflight.errors import EngineFailure
from inflight.serve.server import TritonServer
from inflight.settings.threads import cpu_threads
from inflight.shared_counters import read_pulses

TRITON = "tritonserver"
Transport = Literal["http", "grpc"]
Threads = dict[tuple[str, int], float]
"""CPU seconds so far, by process and thread."""
PROMPT_WORDS, TOKENS = 100, 64
_WARM_UP_S, _WARM_UP_STREAMS = 0.5, 2
_draw = random.Random(0)
"""Draws the words of prompts. No two prompts are alike, so that the prefix cache has none of them."""


@dataclass(frozen=True)
class ServingCost:
    """One row of the report. ``*_us`` are microseconds of CPU for a token."""

    engine: str
    transport: Transport
    streams: int
    tokens_per_second: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    """Longest wait between two chunks of one stream."""
    tokens_per_chunk: float
    triton_us: float
    tokenizer_us: float
    engine_stage_us: float
    """Of the engine's stage, without the threads that compute."""
    detokenizer_us: float
    serving_us: float
    """All of them together."""
    compute_us: float
    """The engine's threads; with the replay engine what they would take, were each step to keep all cores busy."""
    client_us: float
    serving_share: float
    """Of serving and computing together."""


@dataclass(frozen=True)
class Load:
    """An engine to serve with, and who asks it."""

    name: str
    settings: dict[str, Any]
    """Of the deployment."""
    step_ms: float = 0
    """Of the replay engine; 0: the engine computes, in ``engine_threads``."""
    engine_threads: int = 0
    transports: Sequence[Transport] = ("http", "grpc")
    streams: Sequence[int] = (1, 8, 32)


def replay(model: Path, step_ms: float, streams: Sequence[int]) -> Load:
    """Return the load of a replay engine with steps of ``step_ms``; of ``model`` only the tokenizer is used."""
    engine = {"kind": "replay", "replay_step_ms": step_ms}
    settings = {"model": str(model.resolve()), "engine": engine, "batching": {"max_batch_size": max(streams)}}
    return Load(f"replay, {step_ms:g} ms", settings, step_ms=step_ms, streams=streams)


def portable(model: Path, streams: Sequence[int], given: Sequence[str] = ()) -> Load:
    """Return the load of the portable engine in bfloat16, over HTTP.

    ``given`` are settings of the deployment beside those, as ``kv_cache.dtype=int8``.
    """
    settings: dict[str, Any] = {"model": str(model.resolve()), "engine": {"dtype": "bfloat16"}}
    for one in given:
        key, _, value = one.partition("=")
        section, _, name = key.partition(".")
        settings.setdefault(section, {})[name] = yaml.safe_load(value)
    threads = settings["engine"].get("threads") or cpu_threads(native=True)
    return Load(", ".join(["portable", *given]), settings, 0, threads, ("http",), streams)


@dataclass(slots=True)
class _Streams:
    """What the clients saw."""

    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)

    @property
    def chunks(self) -> int:
        """Chunks with text."""
        return len(self.ttft_ms) + len(self.gaps_ms)


def measure_load(load: Load, seconds: float) -> Iterator[ServingCost]:
    """Serve a load's engine, and yield a row for each transport and number of streams."""
    with serve(load.settings) as server:
        for transport in load.transports:
            for streams in load.streams:
                yield _measure(server, load, transport, streams, seconds)


def _measure(server: TritonServer, load: Load, transport: Transport, streams: int, seconds: float) -> ServingCost:
    """Keep ``streams`` streams running for ``seconds`` and count what the processes take meanwhile."""
    asyncio.run(_ask(_client(server, transport), _WARM_UP_STREAMS, _WARM_UP_S))
    before, own, began = _threads(server), time.process_time(), time.monotonic()
    seen = asyncio.run(_ask(_client(server, transport), streams, seconds))
    elapsed, own = time.monotonic() - began, time.process_time() - own
    spent = {thread: cpu - before.get(thread, 0.0) for thread, cpu in _threads(server).items()}
    engine = sorted((cpu for (process, _), cpu in spent.items() if process == ENGINE), reverse=True)
    compute = sum(engine[: load.engine_threads])
    by_process = {name: sum(cpu for (one, _), cpu in spent.items() if one == name) for name, _ in spent}
    by_process[ENGINE] -= compute
    if load.step_ms:
        compute = len(os.sched_getaffinity(0)) * load.step_ms / 1000 * seen.tokens / streams
    serving, per_token = sum(by_process.values()), 1e6 / seen.tokens
    return ServingCost(
        engine=load.name,
        transport=transport,
        streams=streams,
        tokens_per_second=round(seen.tokens / elapsed),
        ttft_ms_p50=round(statistics.median(seen.ttft_ms), 1),
        ttft_ms_p99=round(float(np.percentile(seen.ttft_ms, 99)), 1),
        gap_ms_p50=round(statistics.median(seen.gaps_ms), 1),
        gap_ms_p99=round(float(np.percentile(seen.gaps_ms, 99)), 1),
        gap_ms_max=round(max(seen.gaps_ms), 1),
        tokens_per_chunk=round(seen.tokens / seen.chunks, 2),
        triton_us=round(by_process[TRITON] * per_token, 1),
        tokenizer_us=round(by_process[TOKENIZER] * per_token, 1),
        engine_stage_us=round(by_process[ENGINE] * per_token, 1),
        detokenizer_us=round(by_process[DETOKENIZER] * per_token, 1),
        serving_us=round(serving * per_token, 1),
        compute_us=round(compute * per_token, 1),
        client_us=round(own * per_token, 1),
        serving_share=round(serving / (serving + compute), 3),
    )


def _threads(server: TritonServer) -> Threads:
    """Return the CPU time of each thread of the server and its stages so far."""
    names = {pid: stage for pid, (stage, _) in read_pulses(server.process.pid).items()}
    if set(names.values()) != {TOKENIZER, ENGINE, DETOKENIZER}:
        raise EngineFailure(f"the server has the stages {sorted(names.values())}")
    names[server.process.pid] = TRITON
    return {
        (name, thread.id): thread.user_time + thread.system_time
        for pid, name in names.items()
        for thread in psutil.Process(pid).threads()
    }


def _client(server: TritonServer, transport: Transport) -> AsyncClient | AsyncHttpClient:
    host, settings = server.settings.host, server.settings
    if transport == "http":
        return AsyncHttpClient(f"{host}:{settings.http_port}")
    return AsyncClient(f"{host}:{settings.grpc_port}")


async def _ask(client: AsyncClient | AsyncHttpClient, streams: int, seconds: float) -> _Streams:
    """Run ``streams`` clients, each one request after the other, until the time is over; one request at least."""
    deadline, seen, words = time.monotonic() + seconds, _Streams(), PROMPT.split()

    async def work() -> None:
        while True:
            await _stream(client, " ".join(_draw.choices(words, k=PROMPT_WORDS)), seen)
            if time.monotonic() >= deadline:
                return

    async with client:
        await asyncio.gather(*(work() for _ in range(streams)))
    return seen


async def _stream(client: AsyncClient | AsyncHttpClient, prompt: str, seen: _Streams) -> None:
    last, first = time.monotonic(), True
    async with client.stream(prompt, GenerateOptions(max_tokens=TOKENS, ignore_eos=True)) as stream:
        async for chunk in stream:
            if chunk.text:
                now = time.monotonic()
                (seen.ttft_ms if first else seen.gaps_ms).append(1000 * (now - last))
                last, first = now, False
    seen.tokens += TOKENS
