"""Measures the pipeline: how fast the stages around the engine stream, with an engine that costs nothing.

The server is the real one, with the real ensemble; only the engine replays the prompt in place of running a model.
Every stream's text is checked. The clients run in this process, on the same machine, and share its cores.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from inflight.client import AsyncClient, GenerateOptions
from inflight.errors import EngineFailure
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import FILE_NAME, load_deployment

PROMPT = "In-flight batching lets every request join and leave the running batch at any step. "
LENGTHS = range(150, 251, 10)
"""Tokens per stream, in turn: streams of one length would all begin and end together."""


@dataclass(frozen=True)
class PipelineResult:
    """One row of the report."""

    streams: int
    step_ms: float
    """How long a step of the engine takes; 0: it never waits."""
    tokens_per_second: float
    ttft_ms_p50: float
    ttft_ms_max: float
    gap_ms_p50: float
    gap_ms_p99: float
    gap_ms_max: float
    """Longest wait between two chunks of one stream."""
    tokens_per_chunk: float
    server_cpu_us_per_token: float


@dataclass(slots=True)
class _Stream:
    tokens: int
    text: str
    times: list[float]
    """The time of sending, then of each chunk that had text."""


@contextmanager
def replay_server(model: Path, step_ms: float, max_batch_size: int = 128) -> Iterator[TritonServer]:
    """Serve ``model``'s tokenizer with the replay engine, on free ports."""
    settings = {
        "model": str(model.resolve()),
        "engine": {"kind": "replay", "replay_step_ms": step_ms},
        "batching": {"max_batch_size": max_batch_size},
    }
    with serve(settings) as server:
        yield server


@contextmanager
def serve(settings: dict[str, Any]) -> Iterator[TritonServer]:
    """Serve a deployment with these settings, on free ports."""
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": 5}
    settings = settings | {"server": ports}
    with tempfile.TemporaryDirectory(prefix="inflight-bench-") as directory:
        (Path(directory) / FILE_NAME).write_text(yaml.safe_dump(settings))
        with TritonServer(Path(directory), load_deployment(Path(directory))) as server:
            server.wait_ready()
            yield server


def measure(
    server: TritonServer, streams: int, step_ms: float, seconds: float, warm_up_s: float = 0.5
) -> PipelineResult:
    """Keep ``streams`` streams running for at least ``seconds``, after as many for ``warm_up_s``.

    Raises:
        EngineFailure: a stream's text is not what its tokens decode to.
    """
    url = f"{server.settings.host}:{server.settings.grpc_port}"
    asyncio.run(_run(url, streams, warm_up_s))
    before, started = _cpu_seconds(server), time.monotonic()
    done = asyncio.run(_run(url, streams, seconds))
    elapsed, cpu = time.monotonic() - started, _cpu_seconds(server) - before
    for tokens in LENGTHS:
        if len({stream.text for stream in done if stream.tokens == tokens}) > 1:
            raise EngineFailure(f"streams of the same {tokens} tokens have different texts")
    tokens = sum(stream.tokens for stream in done)
    ttft = [1000 * (stream.times[1] - stream.times[0]) for stream in done]
    gaps = [1000 * (late - early) for one in done for early, late in zip(one.times[1:], one.times[2:], strict=False)]
    return PipelineResult(
        streams=streams,
        step_ms=step_ms,
        tokens_per_second=round(tokens / elapsed),
        ttft_ms_p50=round(statistics.median(ttft), 1),
        ttft_ms_max=round(max(ttft), 1),
        gap_ms_p50=round(statistics.median(gaps or [0]), 2),
        gap_ms_p99=round(float(np.percentile(gaps or [0], 99)), 1),
        gap_ms_max=round(max(gaps, default=0), 1),
        tokens_per_chunk=round(tokens / sum(len(one.times) - 1 for one in done), 2),
        server_cpu_us_per_token=round(1e6 * cpu / tokens, 1),
    )


async def _run(url: str, streams: int, seconds: float) -> list[_Stream]:
    """Run ``streams`` workers, each one request after the other, until the time is over."""
    deadline = time.monotonic() + seconds
    done: list[_Stream] = []
    lengths = itertools.cycle(LENGTHS)

    async def work() -> None:
        while time.monotonic() < deadline:
            done.append(await _one(client, next(lengths)))

    async with AsyncClient(url) as client:
        await asyncio.gather(*(work() for _ in range(streams)))
    return done


async def _one(client: AsyncClient, tokens: int) -> _Stream:
    times, parts = [time.monotonic()], []
    async with client.stream(PROMPT, GenerateOptions(max_tokens=tokens, ignore_eos=True)) as stream:
        async for chunk in stream:
            if chunk.text:
                times.append(time.monotonic())
                parts.append(chunk.text)
    return _Stream(tokens, "".join(parts), times)


def _cpu_seconds(server: TritonServer) -> float:
    """Return the CPU time of the server and its stages so far."""
    root = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
    return sum(one.user + one.system for one in times)
