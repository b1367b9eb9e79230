"""The soak with crashes: the pair under 80 % of its knee, and every few minutes one of its processes is killed."""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

from benchmarks.hostile.front import GENERATE
from benchmarks.hostile.over_http import http_attack
from benchmarks.hostile.pair import Serve, serving
from benchmarks.hostile.sending import SILENT, over_http
from benchmarks.server_soak.processes import SERVER, STAGES, family, take_sample
from benchmarks.server_soak.resuming import CHAT, GatewayClient, ResumingClients
from benchmarks.server_soak.run import SAMPLE_S, Soaked, books
from benchmarks.server_soak.session import WRONG, End
from benchmarks.server_soak.traffic import Traffic
from inflight.errors import EngineFailure
from inflight.serve.processes import look_at

SHARE = 0.8
"""Of the knee."""
VICTIMS = (SERVER, *STAGES)
_TO_GATEWAY = 0.25
"""Share of the requests that go to the gateway."""
_CONCURRENCIES, _RAMP_S = (16, 32), 15.0
_HOSTILE_S, _HOSTILE_PATIENCE_S = 1.0, 60.0
_END_S = 180.0
"""How long the last requests may take to end."""
_LOOK_S, _GONE_S = 0.1, 5.0
_READY = re.compile(r"ready again in (\d+\.\d) s")


@dataclass(frozen=True)
class Crash:
    """One kill."""

    at_s: float
    process: str
    running: int
    """Requests that ran."""
    back_s: float
    """Seconds until the next good answer to a new request, which waits in the queue behind those that go on."""
    ready_s: float
    """Seconds until the server was ready again, by `inflight serve`."""


@dataclass
class Crashed(Soaked):
    """What a soak with crashes has seen."""

    knee: float = 0.0
    """Requests per second, the most that were answered in a closed loop."""
    crashes: list[Crash] = field(default_factory=list)
    hostile: Counter[str] = field(default_factory=Counter)
    """What came of raw hostile requests, one a second."""
    left_behind: list[str] = field(default_factory=list)
    """Processes and files in /dev/shm that there still were after the end."""
    running: int = 0
    """Requests that run at this moment."""

    def take(self, kind: str, end: End, asked: str) -> None:
        """Note how a request ended."""
        self.ends[kind, end.how] += 1
        if end.how == WRONG:
            self.wrong.append({"kind": kind, "ask": asked, "detail": end.detail, "received": end.received})


class _Load:
    """Sends requests of all kinds to one pair."""

    def __init__(self, serve: Serve, seed: int) -> None:
        places, front = serve.front.places, serve.front
        self._traffic, self._random = Traffic(seed), Random(seed)
        self._clients = ResumingClients(places.grpc.host, places.grpc.port, places.http.port)
        self._gateway = GatewayClient(front.gateway.url, front.model)

    async def send(self, soaked: Crashed, say: Callable[[str], object]) -> None:
        """Send one request, and note how it ended."""
        soaked.running += 1
        try:
            if self._random.random() < _TO_GATEWAY:
                number = self._random.random()
                kind, asked, end = CHAT, f"{number}", await self._gateway.send(Random(number))
            else:
                ask = self._traffic.draw()
                kind, asked, end = ask.kind, f"{ask}", await self._clients.send(ask)
        finally:
            soaked.running -= 1
        soaked.take(kind, end, asked)
        if end.how == WRONG:
            say(f"wrong: {kind}: {end.detail[:300]}")

    async def close(self) -> None:
        """Close all connections."""
        await self._clients.close()
        await self._gateway.close()


def soak_with_crashes(
    minutes: float, crash_every_s: float, seed: int, door: bool, say: Callable[[str], object]
) -> Crashed:
    """Serve the demo with its gateway, and the door or not, under load and crashes; stop it.

    Raises:
        EngineFailure: the server did not start, or did not come back.
    """
    soaked = Crashed()
    with serving(door) as serve:
        asyncio.run(_soak(serve, 60 * minutes, crash_every_s, seed, soaked, say))
        known = {process.pid: name for name, process in family(serve.process.pid)}
        began = time.monotonic()
        serve.process.terminate()
        soaked.exit_code = serve.process.wait()
        soaked.stop_s = time.monotonic() - began
    soaked.left_behind = [name for process, name in known.items() if _lives(process)]
    ids = {str(held.process) for sample in soaked.samples for held in sample.processes.values()}
    soaked.left_behind += [one.name for one in Path("/dev/shm").iterdir() if ids & set(one.name.split("_"))]
    return soaked


async def _soak(
    serve: Serve, seconds: float, crash_every_s: float, seed: int, soaked: Crashed, say: Callable[[str], object]
) -> None:
    load = _Load(serve, seed)
    soaked.knee = max([await _closed_loop(load, count, say) for count in _CONCURRENCIES])
    say(f"the knee is at {soaked.knee:.1f} requests/s; {SHARE * soaked.knee:.1f} are sent")
    began = time.monotonic()
    beside = [
        asyncio.create_task(one)
        for one in (
            _watch(serve, began, soaked, say),
            _crash(serve, began, crash_every_s, soaked, say),
            _attack(serve, soaked),
        )
    ]
    try:
        arriving = asyncio.create_task(_open_loop(load, SHARE * soaked.knee, began + seconds, seed, soaked, say))
        await asyncio.wait([arriving, *beside], return_when=asyncio.FIRST_COMPLETED)
        for one in beside:
            if one.done():
                one.result()  # it ends by an error alone
        await arriving
        soaked.seconds = time.monotonic() - began
        soaked.books = await books(serve.front.places.grpc.place)
    finally:
        for one in beside:
            one.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await load.close()


async def _closed_loop(load: _Load, count: int, say: Callable[[str], object]) -> float:
    """Return how many requests per second ``count`` clients get answered that ask one after another."""
    ramp, began = Crashed(), time.monotonic()

    async def ask_on() -> None:
        while time.monotonic() < began + _RAMP_S:
            await load.send(ramp, say)

    await asyncio.gather(*(ask_on() for _ in range(count)))
    return ramp.requests / (time.monotonic() - began)


async def _open_loop(
    load: _Load, rate: float, until: float, seed: int, soaked: Crashed, say: Callable[[str], object]
) -> None:
    """Send requests at random moments, ``rate`` of them a second, whatever is answered; wait for the last ones.

    Raises:
        EngineFailure: some of the last have no end.
    """
    random, tasks, due = Random(f"arrivals {seed}"), set[asyncio.Task[None]](), time.monotonic()
    while due < until:
        due += random.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(load.send(soaked, say))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        _, waiting = await asyncio.wait(set(tasks), timeout=_END_S)
        if waiting:
            raise EngineFailure(f"{len(waiting)} requests have no end {_END_S:g} s after the last was sent")


async def _watch(serve: Serve, began: float, soaked: Crashed, say: Callable[[str], object]) -> None:
    told = 0
    while True:
        now = time.monotonic() - began
        sample = await asyncio.to_thread(take_sample, serve.process.pid, now, soaked.requests)
        soaked.samples.append(sample)
        if now // 60 > told:
            told = int(now // 60)
            held = ", ".join(f"{name} {one.uss / 2**20:.0f}" for name, one in sample.processes.items())
            say(f"{told} min, {soaked.requests:,} requests, {len(soaked.wrong)} wrong; MiB: {held}")
        if serve.process.poll() is not None:
            raise EngineFailure(f"`inflight serve` has ended; it said: {serve.said.read_text()[-1000:]}")
        await asyncio.sleep(SAMPLE_S)


async def _crash(serve: Serve, began: float, every_s: float, soaked: Crashed, say: Callable[[str], object]) -> None:
    """Kill one process after another, and see how soon the next good answer comes."""
    for count, victim in enumerate(cycle(VICTIMS), 1):
        await asyncio.sleep(began + count * every_s - time.monotonic())
        process = next(process for name, process in family(serve.process.pid) if name == victim)
        killed, running = time.monotonic(), soaked.running
        os.kill(process.pid, signal.SIGKILL)
        while await asyncio.to_thread(_one_answer, serve) != "200":
            await asyncio.sleep(_LOOK_S)
        back_s, ready = time.monotonic() - killed, _READY.findall(serve.said.read_text(errors="replace"))
        soaked.crashes.append(Crash(killed - began, victim, running, back_s, float(ready[-1]) if ready else math.nan))
        say(f"{victim} was killed under {running} requests, the next answer {back_s:.1f} s later")


def _lives(process: int) -> bool:
    """Return whether a process that should have ended lives on; one that nobody has asked how it ended does not."""
    deadline = time.monotonic() + _GONE_S
    while (state := look_at(process)) is not None and not state.ended:
        if time.monotonic() > deadline:
            return True
        time.sleep(_LOOK_S)
    return False


def _one_answer(serve: Serve) -> str:
    return serve.front.triton(GENERATE, b'{"text_input": "Hello", "max_tokens": 2}')


async def _attack(serve: Serve, soaked: Crashed) -> None:
    """Send a raw hostile request each second."""
    number = 0
    while True:
        number += 1
        attack = http_attack(Random(f"soak {number}"))
        answer = await asyncio.to_thread(over_http, serve.front.places.http, attack, _HOSTILE_PATIENCE_S)
        soaked.hostile[answer.outcome] += 1
        if answer.outcome == SILENT:
            soaked.take("hostile", End(WRONG, "no answer"), f"{number}")
        await asyncio.sleep(_HOSTILE_S)
