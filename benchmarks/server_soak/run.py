"""The soak of a server: a real one, every feature over HTTP and gRPC for minutes, and what it holds after that."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.server_soak.processes import Sample, take_sample
from benchmarks.server_soak.session import WRONG, Clients, End
from benchmarks.server_soak.traffic import Ask, Traffic
from inflight.engine.snapshot import Snapshot
from inflight.errors import EngineFailure
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import load_deployment
from inflight.top.poller import ONCE_PATIENCE_S, ServerPoller

SAMPLE_S = 5.0
_SETTLE_S = 30.0
"""How long what clients have left may take to end."""


@dataclass
class Soaked:
    """What a soak has seen."""

    seconds: float = 0.0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many requests, by kind and end."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Those whose end was wrong, with what they asked and what came."""
    samples: list[Sample] = field(default_factory=list)
    books: str = ""
    """What of the idle engine's books is wrong; empty: nothing."""
    stop_s: float = 0.0
    exit_code: int | None = None
    stop_log: str = ""
    """What the server logged while it stopped."""

    @property
    def requests(self) -> int:
        """How many requests were sent."""
        return self.ends.total()

    def count(self, ask: Ask, end: End) -> None:
        """Note how a request ended."""
        self.ends[ask.kind, end.how] += 1
        if end.how == WRONG:
            self.wrong.append({"ask": asdict(ask), "detail": end.detail, "received": end.received})


def serve_and_soak(directory: Path, minutes: float, clients: int, seed: int, say: Callable[[str], object]) -> Soaked:
    """Serve a deployment on free ports of this machine, and soak it; see ``soak_server``.

    Raises:
        DeploymentError: it cannot be served.
        EngineFailure: the server ended, or its books cannot be read.
    """
    http, grpc, metrics = free_ports(3)
    ports = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    with TritonServer(directory, override_server(load_deployment(directory), ports)) as server:
        server.wait_ready()
        return soak_server(server, minutes, clients, seed, say)


def soak_server(server: TritonServer, minutes: float, clients: int, seed: int, say: Callable[[str], object]) -> Soaked:
    """Soak a server that is ready, and stop it.

    Args:
        server: it listens on this machine.
        minutes: how long.
        clients: requests at once.
        seed: of all that is random.
        say: gets a line once a minute.

    Raises:
        EngineFailure: the server ended, or its books cannot be read.
    """
    soaked = Soaked()
    asyncio.run(_load(server, 60 * minutes, clients, Traffic(seed), soaked, say))
    with server.log_path.open("rb") as log:  # it stays readable where the server's folder is removed
        log.seek(0, 2)
        began = time.monotonic()
        soaked.exit_code = server.stop()
        soaked.stop_s = time.monotonic() - began
        soaked.stop_log = log.read().decode(errors="replace")
    return soaked


async def _load(
    server: TritonServer, seconds: float, count: int, traffic: Traffic, soaked: Soaked, say: Callable[[str], object]
) -> None:
    settings = server.settings
    clients, began = Clients(settings.host, settings.grpc_port, settings.http_port), time.monotonic()

    async def ask_on() -> None:
        while time.monotonic() < began + seconds:
            ask = traffic.draw()
            end = await clients.send(ask)
            soaked.count(ask, end)
            if end.how == WRONG:
                say(f"wrong: {ask.kind} over {ask.over}, id {ask.request.id}: {end.detail}")

    watcher = asyncio.create_task(_watch(server, began, soaked, say))
    try:
        asking = asyncio.gather(*(ask_on() for _ in range(count)))
        both: list[asyncio.Future[Any]] = [watcher, asking]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():  # the server has ended, and says why
            asking.cancel()
            watcher.result()
        await asking
        soaked.seconds = time.monotonic() - began
        soaked.books = await books(f"{settings.host}:{settings.grpc_port}")
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        await clients.close()


async def _watch(server: TritonServer, began: float, soaked: Soaked, say: Callable[[str], object]) -> None:
    """Take samples until cancelled.

    Raises:
        EngineFailure: the server has ended.
    """
    told = 0
    while True:
        if server.process.poll() is not None:
            raise EngineFailure(f"the server ended {server.how()}: {server.cause()}")
        now = time.monotonic() - began
        sample = await asyncio.to_thread(take_sample, server.process.pid, now, soaked.requests)
        soaked.samples.append(sample)
        if now // 60 > told:
            told = int(now // 60)
            held = ", ".join(f"{name} {one.uss / 2**20:.0f}" for name, one in sample.processes.items())
            say(f"{told} min, {soaked.requests:,} requests, {len(soaked.wrong)} wrong; MiB: {held}")
        await asyncio.sleep(SAMPLE_S)


async def books(grpc: str) -> str:
    """Return what is wrong with the books of the engine behind an address once it is idle; empty: nothing.

    Raises:
        EngineFailure: it does not tell.
    """
    poller = ServerPoller(grpc, None, ONCE_PATIENCE_S)
    deadline = time.monotonic() + _SETTLE_S
    try:
        while True:
            snapshot = (await poller.poll()).snapshot
            if not isinstance(snapshot, Snapshot):
                raise EngineFailure(f"the engine does not tell what it does: {snapshot}")
            wrong = _faults(snapshot)
            if not wrong or time.monotonic() > deadline:
                return wrong
            await asyncio.sleep(0.5)
    finally:
        await poller.close()


def _faults(snapshot: Snapshot) -> str:
    faults = []
    if snapshot.running or snapshot.waiting:
        faults.append(f"{snapshot.running} sequences run and {snapshot.waiting} wait, and nobody asks")
    cache = snapshot.kv_cache
    if cache is not None and cache.free + (cache.cached or 0) != cache.num_blocks:
        faults.append(f"{cache.free} blocks are free and {cache.cached} cached, of {cache.num_blocks}")
    return "; ".join(faults)


def write_raw(soaked: Soaked, path: Path) -> None:
    """Write every sample, and every request whose end was wrong, as JSON."""
    record = {
        "seconds": round(soaked.seconds, 1),
        "wrong": soaked.wrong,
        "stop_log": soaked.stop_log.splitlines(),
        "samples": [asdict(sample) for sample in soaked.samples],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, default=str) + "\n")
