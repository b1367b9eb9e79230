"""Streams that go on: a server or a replica is killed under them, and each answer is compared with an unbroken one.

What is killed, and after how many tokens, is chosen by a seed. The streams mix greedy and sampled requests, with and
without seeds, stop words, penalties, log-probs, several sequences and prompts in many scripts, over gRPC and HTTP.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.faults.served import VICTIMS, Served, serving
from benchmarks.result import Result, Row
from inflight.client import AsyncClient, AsyncHttpClient, Completion, GenerateOptions, Retry, Timeouts
from inflight.errors import EngineFailure, InflightError
from inflight.serve.server import free_ports

ONE, REPLICAS = "one server", "two replicas"
_TOGETHER = 32
_KILLS = 2
"""How often a server is killed under the streams that run together: none may meet more than three breaks."""
_TRIES = 3
_READY_S = 300.0
_PATIENT = Retry(resume=True, longest_outage=300.0)  # of whatever machine
_UNLIMITED = Timeouts(None, None, None)
_PROMPTS = (
    "What is in-flight batching?",
    "Erzähle von Zügen, Bücherwürmern und süßen Äpfeln.",
    "請用繁體中文解釋什麼是分頁式快取。",
    "Объясни, что такое токен 🙂🚂",
    "شرح الذاكرة المؤقتة",
    "नमस्ते, कैश क्या है?",
)
_FEATURES: tuple[GenerateOptions, ...] = (
    GenerateOptions(),
    GenerateOptions(return_log_probs=True, num_top_log_probs=3),
    GenerateOptions(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.25, return_log_probs=True),
    GenerateOptions(stop_words=["zq", " the end", "\n\n\n"], min_tokens=40),
    GenerateOptions(num_return_sequences=2, return_log_probs=True),
    GenerateOptions(bad_words=["e"], top_k=40, min_tokens=60, ignore_eos=None),
)
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
class Ask:
    """One stream: what is asked, and what came of it."""

    number: int
    options: GenerateOptions
    answer: Completion | None = None
    breaks: int = 0
    error: str = ""

    @property
    def whole(self) -> bool:
        """Whether its answer came in one run."""
        return self.answer is not None and not self.breaks

    @property
    def prompt(self) -> str:
        return _PROMPTS[self.number % len(_PROMPTS)]

    @property
    def http(self) -> bool:
        return bool(self.number // len(_PROMPTS) % 2)

    def unbroken(self) -> Ask:
        """Return the request that gives the same answer: with the seed that the server has told, if it chose one."""
        if self.answer is None or self.answer.used_seed is None or self.options.seed is not None:
            return Ask(self.number, self.options)
        return Ask(self.number, replace(self.options, seed=self.answer.used_seed))


@dataclass
class _Tokens:
    """How many tokens have come of all streams, for those who wait for some."""

    count: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, tokens: int) -> None:
        self.count += tokens
        self.changed.set()

    async def reach(self, count: int) -> None:
        while self.count < count:
            self.changed.clear()
            await self.changed.wait()


def make_asks(first: int, count: int, seed: int) -> list[Ask]:
    """Return so many streams, chosen by the seed; ``first`` is the number of the first."""
    rng = random.Random(seed * 1_000_003 + first)
    asks = []
    for number in range(first, first + count):
        options = replace(_FEATURES[rng.randrange(len(_FEATURES))], max_tokens=rng.randrange(150, 500))
        options = replace(options, return_num_input_tokens=True, return_num_output_tokens=True)
        if options.stop_words is None and rng.random() < 0.9:
            options = replace(options, ignore_eos=True)
        kind = number % 3  # greedy, sampled by a seed, and by one that the server chooses
        if kind:
            options = replace(options, temperature=rng.choice([0.7, 1.0, 1.3]), top_p=rng.choice([0.9, None]))
        if kind == 1:
            options = replace(options, seed=rng.getrandbits(64))
        if kind == 2:
            options = replace(options, num_return_sequences=None)  # each of several has a seed of its own
        asks.append(Ask(number, options))
    return asks


async def _run(asks: Sequence[Ask], grpc: str, http: str, tokens: _Tokens, over: asyncio.Event) -> None:
    async def one(ask: Ask) -> None:
        kind, url = (AsyncHttpClient, http) if ask.http else (AsyncClient, grpc)
        async with (
            kind(url, retry=_PATIENT, timeouts=_UNLIMITED) as client,  # whose connection goes to any replica
            client.stream(ask.prompt, ask.options) as stream,
        ):
            try:
                async for chunk in stream:
                    tokens.add(len(chunk.token_ids))
                ask.answer = stream.completion()
            except InflightError as error:
                ask.error = f"{type(error).__name__}: {error}"
            ask.breaks = stream.breaks

    await asyncio.gather(*map(one, asks))
    over.set()


async def _killing(
    asks: Sequence[Ask], serves: Sequence[Served], tokens: _Tokens, over: asyncio.Event, rng: random.Random
) -> list[str]:
    """Kill processes of the servers after so many tokens as chance wants; return which."""
    expected = sum((ask.options.max_tokens or 0) for ask in asks)
    killed: list[str] = []
    for share in sorted(rng.uniform(0.02, 0.45) for _ in range(_KILLS)):
        await _first(tokens.reach(int(share * expected)), over.wait())
        if over.is_set():
            break
        victim, serve = rng.choice(VICTIMS), serves[len(killed) % len(serves)]
        os.kill(serve.process_of(victim), signal.SIGKILL)
        killed.append(victim)
        if len(serves) == 1:
            await _until_back(serve, len(killed))
    return killed


async def _until_back(serve: Served, times: int) -> None:
    """Wait until a server has been started again so often: what is killed next is to be one that serves."""
    async with asyncio.timeout(_READY_S):
        while serve.starts < times:
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

    def row(self, setting: str, http: bool) -> Row:
        """Return a row about the streams of one protocol."""
        pairs = [(a, b) for a, b in zip(self.asks, self.unbroken, strict=True) if a.http == http]
        wholes = [(_parts(a.answer), _parts(b.answer)) for a, b in pairs if a.answer and b.answer]
        return {
            "setting": setting,
            "protocol": "HTTP" if http else "gRPC",
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


async def _wave(asks: Sequence[Ask], serves: Sequence[Served], grpc: str, http: str, seed: int) -> Wave:
    """Break the streams, and then ask the same without."""
    for serve in serves:
        async with AsyncClient(serve.grpc) as client:
            await client.wait_ready(_READY_S)
    tokens, over = _Tokens(), asyncio.Event()
    rng = random.Random(seed * 7919 + asks[0].number)
    _, killed = await asyncio.gather(_run(asks, grpc, http, tokens, over), _killing(asks, serves, tokens, over, rng))
    unbroken = [ask.unbroken() for ask in asks]
    for _ in range(_TRIES):  # Triton aborts by itself where a machine stands still for a second
        await _run(
            [ask for ask in unbroken if not ask.whole], serves[0].grpc, serves[0].http, _Tokens(), asyncio.Event()
        )
    if not all(ask.whole for ask in unbroken):
        raise EngineFailure("streams broke that nobody had killed a server under; their answers are no references")
    return Wave(asks, unbroken, killed)


def break_streams(setting: str, asks: Sequence[Ask], seed: int) -> Wave:
    """Break streams that run together, on ``ONE`` server or over ``REPLICAS``.

    Raises:
        InflightError: a server did not start or come back.
    """
    with ExitStack() as stack:
        serves = [stack.enter_context(serving()) for _ in range(1 if setting == ONE else 2)]
        grpc, http = serves[0].grpc, serves[0].http
        if setting == REPLICAS:
            grpc, http = stack.enter_context(_proxied(serves))
        return asyncio.run(_wave(asks, serves, grpc, http, seed))


def measure_resume(streams: int, seed: int, say: Callable[[str], object]) -> Result:
    """Break streams at random tokens, half of them on one server and half over two replicas, and compare them.

    Raises:
        InflightError: a server did not start or come back.
    """
    rows: list[Row] = []
    killed: dict[str, list[str]] = {ONE: [], REPLICAS: []}
    for place, first in enumerate(range(0, streams, _TOGETHER)):
        setting = (ONE, REPLICAS)[place % 2]
        wave = break_streams(setting, make_asks(first, min(_TOGETHER, streams - first), seed), seed)
        killed[setting] += wave.killed
        rows += (wave.row(setting, False), wave.row(setting, True))
        say(f"{setting}: {len(wave.asks)} streams, of which {sum(ask.breaks > 0 for ask in wave.asks)} went on")
        for ask in wave.asks:
            if ask.error:
                say(f"stream {ask.number} has no end: {ask.error}")
    kinds = dict.fromkeys((row["setting"], row["protocol"]) for row in rows)
    totals = [_total([row for row in rows if (row["setting"], row["protocol"]) == kind]) for kind in kinds]
    return Result("resume", "Streams that go on", _finding(totals, killed), totals)


def _total(rows: Sequence[Row]) -> Row:
    """Return rows of one setting added up."""
    return {
        name: value if isinstance(value, str) else sum(int(row[name]) for row in rows)
        for name, value in rows[0].items()
    }


def _finding(rows: Sequence[Row], killed: Mapping[str, Sequence[str]]) -> str:
    def sum_of(name: str) -> int:
        return sum(int(row[name]) for row in rows)

    others = sum(sum_of(f"other {name.replace('_', ' ')}") for name in _COMPARED)
    kills = "; ".join(
        f"on {setting} {', '.join(f'{victim} {times} times' for victim, times in Counter(victims).items())}"
        for setting, victims in killed.items()
        if victims
    )
    broken, breaks, errors = (sum_of(name) for name in ("of them broken", "breaks", "errors"))
    return (
        f"{sum_of('streams')} streams, {_TOGETHER} at a time, from `inflight serve` with the demo to clients with "
        f"`Retry(resume=True)`; the two replicas are behind HAProxy. Meanwhile processes were killed by SIGKILL: "
        f"{kills}. {broken} streams went on, after {breaks} breaks, and {errors} ended with an error. Each answer, of "
        f"{sum_of('tokens')} tokens in all, was compared with an unbroken run of the same request and seed (where the "
        f"server chose the seed, the one that it told): there were {others} differences in text, token ids, log-probs, "
        "sums of them, likeliest tokens, usage or finish reasons."
    )
