"""Streams that go on: a server or a replica is killed under them, and each answer is compared with an unbroken one.

What is killed, and after how many tokens, is chosen by a seed. The streams mix greedy and sampled requests, with and
without seeds, stop words, penalties, log-probs, several sequences and prompts in many scripts, over gRPC, HTTP and
OpenAI's API. Inflight's clients resume their streams; OpenAI's are resumed by the gateway, and their client knows
nothing of it.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle, product
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks.faults.openai import model_name, streamed_completion
from benchmarks.faults.served import VICTIMS, Served, serving
from benchmarks.result import Result, Row
from benchmarks.resume_asks import GREEDY, HTTP, OPENAI, PROTOCOLS, SAMPLED, Ask, make_asks
from inflight.addresses import read_directly
from inflight.client import AsyncClient, AsyncHttpClient, Completion, Retry, Timeouts
from inflight.errors import EngineFailure, InflightError
from inflight.resources import DEMO
from inflight.serve.server import free_ports

ONE, REPLICAS = "one server", "two replicas"
_WAVES = 4
"""How many waves of streams run in each setting, one after the other, each all at once: a batch has room for one."""
_KILLS = (2, 1, 1, 1)
"""How often the one server is killed in each wave; each replica is killed once in each. No stream may meet more than
three breaks, and no server is started more than six times in a row."""
_FIRST, _LATER = (0.02, 0.25), (0.25, 0.9)
"""Between which shares of a wave's tokens each server is killed first, and when again."""
_TRIES = 3
_READY_S = 300.0
_PATIENT = Retry(resume=True, longest_outage=300.0)  # of whatever machine
_UNLIMITED = Timeouts(None, None, None)
_RESUMED = re.compile(r'^inflight_gateway_resumed_total\{outcome="resumed"\} (\S+)$', re.MULTILINE)
_HAPROXY = """
global
  maxconn 4096
defaults
  mode http
  timeout connect 2s
  timeout client 10m
  timeout server 10m
  timeout check 2s
  option redispatch
  option httpchk GET /v2/health/ready
  default-server check inter 500ms fall 1 rise 1
frontend grpc
  mode tcp
  bind 127.0.0.1:{grpc}
  default_backend grpc
frontend http
  bind 127.0.0.1:{http}
  default_backend http
backend grpc
  mode tcp
{by_grpc}
backend http
{by_http}
"""


_COMPARED = ("text", "token_ids", "log_probs", "cum_log_prob", "top_log_probs", "usage", "finish_reason")
"""What is to be equal of each sequence of an answer."""


@dataclass
class _Tokens:
    """How many tokens have come of all streams, for those who wait for some."""

    count: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, tokens: int) -> None:
        self.count += tokens
        self.changed.set()

    async def reach(self, count: int, asks: Sequence[Ask]) -> None:
        """Wait until so many tokens have come, and some of each of the streams."""
        while self.count < count or not all(ask.began or ask.over for ask in asks):
            self.changed.clear()
            await self.changed.wait()


@dataclass(frozen=True)
class Servers:
    """The servers of a setting, and where clients find them."""

    all: Sequence[Served]
    grpc: str
    http: str
    victims: Iterator[str]
    """Which process is killed next: each in turn."""

    def one(self) -> Servers:
        """Return the first of them alone."""
        first = self.all[0]
        return Servers([first], first.grpc, first.http, self.victims)


async def _run(asks: Sequence[Ask], servers: Servers, tokens: _Tokens, over: asyncio.Event) -> None:
    def came(ask: Ask, count: int) -> None:
        ask.began |= count > 0
        tokens.add(count)

    async def resumed_by_client(ask: Ask) -> None:
        kind, url = (AsyncHttpClient, servers.http) if ask.protocol == HTTP else (AsyncClient, servers.grpc)
        async with (
            kind(url, retry=_PATIENT, timeouts=_UNLIMITED) as client,  # whose connection goes to any replica
            client.stream(ask.prompt, ask.options) as stream,
        ):
            try:
                async for chunk in stream:
                    came(ask, len(chunk.token_ids))
                ask.answer = stream.completion()
            finally:
                ask.breaks = stream.breaks

    async def resumed_by_gateway(ask: Ask) -> None:
        url = f"http://{servers.all[ask.place(len(servers.all))].gateway}"
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
            body = ask.body(await model_name(client))
            ask.answer = await streamed_completion(client, body, lambda count: came(ask, count))

    async def one(ask: Ask) -> None:
        try:
            await (resumed_by_gateway if ask.protocol == OPENAI else resumed_by_client)(ask)
        except (InflightError, httpx.HTTPError) as error:
            ask.error = f"{type(error).__name__}: {error}"
        ask.over = True
        tokens.changed.set()

    await asyncio.gather(*map(one, asks))
    over.set()


async def _killing(
    asks: Sequence[Ask], servers: Servers, kills: int, tokens: _Tokens, over: asyncio.Event, rng: random.Random
) -> list[str]:
    """Kill processes of the servers after so many tokens as chance wants; return which."""
    expected = sum((ask.options.max_tokens or 0) for ask in asks)
    count = len(servers.all)
    shares = [rng.uniform(*(_FIRST if number < count else _LATER)) for number in range(kills)]
    killed: list[str] = []
    for share in sorted(shares):
        place = len(killed) % count
        victim, serve = next(servers.victims), servers.all[place]
        # It takes a moment to find the process, in which tokens would come.
        process, starts = serve.process_of(victim), serve.starts
        await _first(tokens.reach(int(share * expected), asks), over.wait())
        if over.is_set():
            break
        if serve.starts != starts:  # Triton has aborted by itself
            process, starts = serve.process_of(victim), serve.starts
        os.kill(process, signal.SIGKILL)
        killed.append(victim)
        for ask in asks:
            ask.breaks += ask.protocol == OPENAI and not ask.over and ask.place(count) == place
        if count == 1:  # what is killed next is to be one that serves
            await _until_back(serve, starts)
    return killed


async def _until_back(serve: Served, starts: int) -> None:
    """Wait until a server that was started so often has been started again."""
    async with asyncio.timeout(_READY_S):
        while serve.starts == starts:
            await asyncio.sleep(0.1)


async def _first(*steps: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(step) for step in steps]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def _proxied(serves: Sequence[Served]) -> Iterator[tuple[str, str]]:
    """Run HAProxy before the servers; yield its addresses for gRPC and HTTP."""
    grpc, http = free_ports(2)
    by_grpc = [f"  server s{n} {one.grpc} port {one.http.rpartition(':')[2]}" for n, one in enumerate(serves)]
    by_http = [f"  server s{n} {one.http}" for n, one in enumerate(serves)]
    text = _HAPROXY.format(grpc=grpc, http=http, by_grpc="\n".join(by_grpc), by_http="\n".join(by_http))
    with TemporaryDirectory(prefix="inflight-resume-") as folder:
        path = Path(folder) / "haproxy.cfg"
        path.write_text(text)
        process = subprocess.Popen(["haproxy", "-q", "-f", str(path)])
        try:
            yield f"127.0.0.1:{grpc}", f"127.0.0.1:{http}"
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class Wave:
    """Streams that ran together: those that were broken, the same unbroken, and what was killed."""

    asks: Sequence[Ask]
    unbroken: Sequence[Ask]
    killed: Sequence[str]
    resumed: int
    """How often the gateways say that they have resumed one of OpenAI's."""

    def row(self, setting: str, protocol: str, sampling: str) -> Row:
        """Return a row about the streams of one protocol that are greedy, or sampled."""
        both = zip(self.asks, self.unbroken, strict=True)
        pairs = [(a, b) for a, b in both if (a.protocol, a.sampling) == (protocol, sampling)]
        wholes = [(_parts(a.answer), _parts(b.answer)) for a, b in pairs if a.answer and b.answer]
        return {
            "setting": setting,
            "protocol": protocol,
            "sampling": sampling,
            "streams": len(pairs),
            "of them broken": sum(a.breaks > 0 for a, _ in pairs),
            "breaks": sum(a.breaks for a, _ in pairs),
            "tokens": sum(len(part.token_ids) for whole, _ in wholes for part in whole),
            "errors": sum(bool(a.error) for a, _ in pairs),
            **{f"other {name.replace('_', ' ')}": sum(_differ(pair, name) for pair in wholes) for name in _COMPARED},
        }


def _parts(answer: Completion) -> list[Completion]:
    return [answer, *answer.alternatives]


def _differ(pair: tuple[list[Completion], list[Completion]], name: str) -> bool:
    one, other = ([getattr(part, name) for part in parts] for parts in pair)
    return one != other


async def _wave(asks: Sequence[Ask], servers: Servers, kills: int, seed: int) -> Wave:
    """Break the streams, and then ask the same without."""
    await asyncio.gather(*map(_until_ready, servers.all))
    before = _resumed(servers.all)
    tokens, over = _Tokens(), asyncio.Event()
    rng = random.Random(f"{seed} {asks[0].number}")
    _, killed = await asyncio.gather(
        _run(asks, servers, tokens, over), _killing(asks, servers, kills, tokens, over, rng)
    )
    resumed = int(_resumed(servers.all) - before)
    await _until_ready(servers.all[0])
    unbroken = [ask.unbroken() for ask in asks]
    for _ in range(_TRIES):  # Triton aborts by itself where a machine stands still for a second
        before = _resumed(servers.all[:1])
        again = [ask for ask in unbroken if not ask.whole]
        await _run(again, servers.one(), _Tokens(), asyncio.Event())
        for ask in again:
            if ask.protocol == OPENAI:
                ask.breaks = int(_resumed(servers.all[:1]) - before)
    if not all(ask.whole for ask in unbroken):
        raise EngineFailure("streams broke that nobody had killed a server under; their answers are no references")
    return Wave(asks, unbroken, killed, resumed)


def _resumed(serves: Sequence[Served]) -> float:
    """Return how often the gateways of the servers have resumed a stream so far."""
    pages = (read_directly(f"http://{serve.gateway}/metrics", timeout_s=60).decode() for serve in serves)
    return sum(float(count) for page in pages for count in _RESUMED.findall(page))


async def _until_ready(serve: Served) -> None:
    """Wait until a server answers at both of its ports."""
    async with AsyncClient(serve.grpc) as client:
        await client.wait_ready(_READY_S)
    async with asyncio.timeout(_READY_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with suppress(httpx.HTTPError):
                (await client.get(f"http://{serve.gateway}/health")).raise_for_status()
                return
            await asyncio.sleep(0.1)


def break_streams(setting: str, asks: Sequence[Ask], seed: int) -> list[Wave]:
    """Break streams in waves, on ``ONE`` server or over ``REPLICAS``.

    Raises:
        InflightError: a server did not start or come back.
    """
    waves = []
    victims = cycle(random.Random(f"{seed} {setting}").sample(VICTIMS, len(VICTIMS)))
    with ExitStack() as stack:
        serves = [stack.enter_context(serving(deployment=DEMO)) for _ in range(1 if setting == ONE else 2)]
        grpc, http = serves[0].grpc, serves[0].http
        if setting == REPLICAS:
            grpc, http = stack.enter_context(_proxied(serves))
        servers = Servers(serves, grpc, http, victims)
        for place in range(_WAVES):
            kills = _KILLS[place] if setting == ONE else len(serves)
            if together := asks[place * len(asks) // _WAVES : (place + 1) * len(asks) // _WAVES]:
                waves.append(asyncio.run(_wave(together, servers, kills, seed)))
    return waves


def measure_resume(streams: int, seed: int, say: Callable[[str], object]) -> Result:
    """Break streams at random tokens, half of them on one server and half over two replicas, and compare them.

    Raises:
        InflightError: a server did not start or come back.
    """
    half = streams // 2
    settings = {ONE: make_asks(0, half, seed), REPLICAS: make_asks(half, streams - half, seed)}
    with ThreadPoolExecutor(len(settings)) as threads:  # at once: on most machines they wait for starts
        both = list(threads.map(lambda setting: break_streams(setting, settings[setting], seed), settings))
    rows: list[Row] = []
    killed: dict[str, list[str]] = {}
    resumed = sum(wave.resumed for waves in both for wave in waves)
    for setting, waves in zip(settings, both, strict=True):
        for ask in (ask for wave in waves for ask in wave.asks if ask.error):
            say(f"{setting}: stream {ask.number} has no end: {ask.error}")
        killed[setting] = [victim for wave in waves for victim in wave.killed]
        for protocol, sampling in product(PROTOCOLS, (GREEDY, SAMPLED)):
            rows.append(_total([wave.row(setting, protocol, sampling) for wave in waves]))
    return Result("resume", "Streams that go on", _finding(rows, killed, resumed), rows)


def _total(rows: Sequence[Row]) -> Row:
    """Return rows of one setting added up."""
    return {
        name: value if isinstance(value, str) else sum(int(row[name]) for row in rows)
        for name, value in rows[0].items()
    }


def _finding(rows: Sequence[Row], killed: Mapping[str, Sequence[str]], resumed: int) -> str:
    def sum_of(name: str) -> int:
        return sum(int(row[name]) for row in rows)

    others = sum(sum_of(f"other {name.replace('_', ' ')}") for name in _COMPARED)
    kills = "; ".join(
        f"on {setting} {', '.join(f'{times} x {victim}' for victim, times in Counter(victims).items())}"
        for setting, victims in killed.items()
        if victims
    )
    together = -(-sum_of("streams") // 2 // _WAVES)
    broken, breaks, errors = (sum_of(name) for name in ("of them broken", "breaks", "errors"))
    return (
        f"{sum_of('streams')} streams, up to {together} at a time, from `inflight serve` with the demo: to clients of "
        "gRPC and HTTP with `Retry(resume=True)`, for which two replicas are behind HAProxy, and over OpenAI's API, "
        "where the gateway of each server resumes them. Meanwhile processes were killed by SIGKILL: "
        f"{kills}. {broken} streams went on, after {breaks} breaks, and {errors} ended with an error. (A break of one "
        f"of OpenAI's is a kill of its engine while it ran; the gateways have resumed {resumed}.) Each answer, of "
        f"{sum_of('tokens')} tokens in all, was compared with an unbroken run of the same request and seed (where the "
        f"server chose the seed, the one that it told): there were {others} differences in text, token ids, log-probs, "
        "sums of them, likeliest tokens, usage or finish reasons."
    )
