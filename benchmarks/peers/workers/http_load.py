"""The worker that measures a server: it starts the server, asks it at each number of streams, and stops it.

The client is one thread of asyncio on the server's own processors, with a connection for each request. An event of the
stream that has text is one chunk; its time is when its last byte was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from string import ascii_lowercase
from typing import Any

import numpy as np
import psutil

from benchmarks.peers.workers.work import Others

_READY_S, _REQUEST_S, _STOP_S, _POLL_S = 600.0, 300.0, 60.0, 0.2
_LETTERS, _WORD_LETTERS = ascii_lowercase[:20], 3
"""Three of these letters in the order of the alphabet are one token of the made-up tokenizer."""


class ServerFailure(Exception):
    """The server did not start, or answered wrongly."""


@dataclass(frozen=True)
class Dialect:
    """How one server is spoken to."""

    ready: str
    """The path that answers 200 once the server is ready."""
    path: str
    body: Callable[[str, str, int], dict[str, Any]]
    """Model, prompt and number of tokens to a request for a greedy stream that no end id ends, which tells at its end
    how many tokens it had."""
    text: Callable[[Mapping[str, Any]], str]
    """An event's text."""
    made: Callable[[Mapping[str, Any]], int | None]
    """How many tokens an event says there were in all; None: it does not say."""


def _ours(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    return {
        "text_input": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "return_num_output_tokens": True,
    }


def _openai(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def _llama(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "stream": True}


DIALECTS = {
    "inflight": Dialect(
        "/v2/health/ready",
        "/v2/models/ensemble/generate_stream",
        _ours,
        lambda event: str(event["text_output"]),
        lambda event: event.get("num_output_tokens"),
    ),
    "openai": Dialect(
        "/health",
        "/v1/completions",
        _openai,
        lambda event: "".join(choice["text"] for choice in event["choices"]),
        lambda event: (event.get("usage") or {}).get("completion_tokens"),
    ),
    "llama.cpp": Dialect(
        "/health",
        "/completion",
        _llama,
        lambda event: str(event["content"]),
        lambda event: event["tokens_predicted"] if event["stop"] else None,
    ),
}


@dataclass
class Stream:
    """What was seen of one request."""

    sent_s: float
    chunks_s: list[float] = field(default_factory=list)
    """The time of each chunk."""
    made: int | None = None
    """Tokens, as the server says."""


class Client:
    """Asks one server."""

    def __init__(self, dialect: Dialect, port: int, model: str, tokens: int) -> None:
        self._dialect, self._port, self._model, self._tokens = dialect, port, model, tokens

    async def ask(self, prompt: str) -> Stream:
        """Send one request and read its stream to the end.

        Raises:
            ServerFailure: the answer is no stream of so many tokens.
        """
        body = json.dumps(self._dialect.body(self._model, prompt, self._tokens)).encode()
        head = f"POST {self._dialect.path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        stream = Stream(time.perf_counter())
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            writer.write(head.encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise ServerFailure(f"{status.decode().strip()}: {(await reader.read())[-300:]!r}")
            async for line in reader:
                if line.startswith(b"data:"):  # the lines between are of HTTP's chunks
                    self._read(line[5:].strip(), stream)
        finally:
            writer.close()
        if stream.made != self._tokens:
            raise ServerFailure(f"a stream of {self._tokens} tokens was asked for, and {stream.made} came")
        return stream

    def _read(self, data: bytes, stream: Stream) -> None:
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
            text, made = self._dialect.text(event), self._dialect.made(event)
        except (KeyError, TypeError, ValueError):
            raise ServerFailure(f"this event is not understood: {data[:300]!r}") from None
        if text:
            stream.chunks_s.append(time.perf_counter())
        stream.made = stream.made if made is None else made

    async def ask_all(self, prompts: Sequence[str], streams: int) -> list[Stream]:
        """Send all the prompts, ``streams`` at a time."""
        waiting, done = iter(prompts), list[Stream]()

        async def work() -> None:
            for prompt in waiting:
                done.append(await asyncio.wait_for(self.ask(prompt), _REQUEST_S))

        await asyncio.gather(*(work() for _ in range(streams)))
        return done


def prompts(count: int, words: int, seed: int) -> list[str]:
    """Return prompts of so many words, each word one token; no two begin alike, but by chance."""
    generator = random.Random(seed)
    known = ["".join(letters) for letters in combinations(_LETTERS, _WORD_LETTERS)]
    return [" ".join(generator.choices(known, k=words)) for _ in range(count)]


def figures(streams: Sequence[Stream], seconds: float, cpu_seconds: float) -> dict[str, float]:
    """Return what was seen of the requests of one load, which took so long."""
    tokens = sum(stream.made or 0 for stream in streams)
    ttft = [1000 * (stream.chunks_s[0] - stream.sent_s) for stream in streams]
    gaps = [1000 * (late - early) for stream in streams for early, late in pairwise(stream.chunks_s)] or [0.0]
    return {
        "tokens_per_s": tokens / seconds,
        "cpu_ms_per_token": 1000 * cpu_seconds / tokens,
        "ttft_p50_ms": statistics.median(ttft),
        "gap_p50_ms": statistics.median(gaps),
        "gap_p99_ms": float(np.percentile(gaps, 99)),
        "gap_longest_ms": max(gaps),
        "tokens_per_chunk": tokens / sum(len(stream.chunks_s) for stream in streams),
    }


def cpu_seconds(root: psutil.Process) -> float:
    """Return the CPU time so far of a process and of all that it has started and not yet lost."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], port: int, ready: str) -> Iterator[psutil.Process]:
    """Start a server, wait until it is ready, and stop it in the end, with all that it started.

    Raises:
        ServerFailure: it ended, or was not ready in time.
    """
    process = subprocess.Popen(list(command), stdout=2, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + _READY_S
        while not _is_ready(port, ready):
            if process.poll() is not None:
                raise ServerFailure(f"the server ended with code {process.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise ServerFailure(f"the server was not ready in {_READY_S:g} s")
            time.sleep(_POLL_S)
        yield psutil.Process(process.pid)
    finally:
        _stop(process)


def _is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    for one in psutil.wait_procs(started, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do the job of ``serving.serve_job``: each load after a short one of as many streams."""
    dialect = DIALECTS[job["dialect"]]
    client = Client(dialect, job["port"], job["model"], job["output"])
    found = []
    with serving(job["command"], job["environment"], job["port"], dialect.ready) as server:
        others = Others(lambda: cpu_seconds(server) + time.process_time(), os.sched_getaffinity(0))
        for number, load in enumerate(job["loads"]):
            count, streams, seed = load["requests"], load["streams"], 1000 * job["seed"] + number
            asyncio.run(client.ask_all(prompts(streams, job["words"], -1 - seed), streams))
            begun, before = time.perf_counter(), cpu_seconds(server)
            done = asyncio.run(client.ask_all(prompts(count, job["words"], seed), streams))
            took, spent = time.perf_counter() - begun, cpu_seconds(server) - before
            found.append({"streams": streams, **figures(done, took, spent)})
        share = others.share()
    return {"loads": found, "others": share}


def main() -> None:
    """Do the job of the standard input, and answer on the standard output."""
    job = json.load(sys.stdin)
    try:
        print(json.dumps({"result": measure(job)}), flush=True)
    except (ServerFailure, OSError, TimeoutError) as failure:
        sys.exit(str(failure) or type(failure).__name__)


if __name__ == "__main__":
    main()
