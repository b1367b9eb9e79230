"""Where the requests of locust's users are really sent: a process of its own, with asyncio and Inflight's own client.

Locust's greenlets say which session is next; this sends it, exactly as ``inflight load`` does, and takes all times. So
neither gevent nor locust's bookkeeping is in a measurement, and a chunk costs them nothing. Knows nothing of locust.

Both sides speak JSON lines. To here: the settings, ``begin``, ``start`` and ``cancel`` of sessions, ``end``. From here:
``ready`` or ``error``, each ``record``, each session ``done``, the ``state`` every second, and ``ended``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight.client import AsyncClient, AsyncHttpClient
from inflight.deployment import load_deployment
from inflight.errors import InflightError
from inflight.load.observation import Observation
from inflight.load.prompts import PromptWriter
from inflight.load.runner import Runner, client_for
from inflight.load.scenario import load_scenario
from inflight.load.workload import Workload

GRPC, HTTP = "grpc", "http"
_STATE_S = 1.0
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Settings:
    """What is needed to make the workload and to send it."""

    scenario: str
    """Its file."""
    deployment: str
    """Directory of the deployment that the server runs."""
    grpc_url: str
    http_url: str
    seed: int | None = None
    duration_scale: float = 1.0

    def workload(self) -> Workload:
        """Return the workload.

        Raises:
            InflightError: the scenario or the deployment cannot be used.
        """
        scenario = load_scenario(Path(self.scenario))
        scenario = scenario if self.duration_scale == 1 else scenario.scaled(self.duration_scale)
        writer = PromptWriter.of_checkpoint(load_deployment(Path(self.deployment)).model)
        return Workload(scenario, writer, self.seed)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


class Lane(Runner):
    """The sessions of one transport; who calls says which one starts when, and gets every record at once."""

    def __init__(
        self,
        workload: Workload,
        client: AsyncClient | AsyncHttpClient,
        block_tokens: int | None,
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(workload, client, block_tokens)
        self._tell = tell
        self._sessions: dict[int, asyncio.Task[None]] = {}

    def begin(self) -> None:
        """Set the clock to 0."""
        self._began = time.perf_counter()

    def start(self, number: int, at: float | None) -> None:
        """Start a session; in an open loop, at its time."""
        self._sessions[number] = asyncio.create_task(self._session(number, at))

    def cancel(self, number: int) -> None:
        """Break a session off; its request counts as unfinished."""
        if number in self._sessions:
            self._sessions[number].cancel()

    @property
    def sessions(self) -> list[asyncio.Task[None]]:
        """Those under way."""
        return list(self._sessions.values())

    async def _session(self, number: int, at: float | None) -> None:
        answered = False
        try:
            session = self.workload.session(number)  # before its time: making a long prompt takes some
            if at is not None:
                await asyncio.sleep(max(0.0, at - self.clock()))
            answered = await self._converse(session, at)
        finally:
            del self._sessions[number]
            self._tell({"done": number, "answered": answered})

    async def _observe(self, one: Observation, answers: list[str]) -> None:
        try:
            await super()._observe(one, answers)
        finally:
            self._tell({"record": self.records[-1].as_json()})
            del self.records[:-1]  # bounded memory: the other side keeps them


class Sender:
    """All that this process does for one test."""

    def __init__(self, settings: Settings, tell: Callable[[dict[str, Any]], None]) -> None:
        workload = settings.workload()
        block_tokens = load_deployment(Path(settings.deployment)).kv_cache.block_size
        self._clients = {GRPC: client_for(settings.grpc_url, False), HTTP: client_for(settings.http_url, True)}
        self._tell = tell
        self._lanes = {
            kind: Lane(workload, client, block_tokens, self._teller(kind)) for kind, client in self._clients.items()
        }
        self._first = self._lanes[GRPC]
        self._background: set[asyncio.Task[None]] = set()
        self._ending: asyncio.Task[None] | None = None
        self._cpu_before = 0.0

    def _teller(self, kind: str) -> Callable[[dict[str, Any]], None]:
        return lambda message: self._tell(message | {"kind": kind})

    async def serve(self, commands: asyncio.StreamReader) -> None:
        """Obey until nobody is there any more; what still runs then is cancelled."""
        try:
            while line := await commands.readline():
                self._obey(json.loads(line))
        finally:
            for task in self._background:
                task.cancel()
            await self._drain(0)
            for client in self._clients.values():
                await client.close()

    def _obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"begin": _}:
                self._cpu_before = time.process_time()
                for lane in self._lanes.values():
                    lane.begin()
                self._spawn(self._first.watch.watch())
                self._spawn(self._report())
            case {"start": int(number), "kind": str(kind), "at": at}:
                self._lanes[kind].start(number, at)
            case {"cancel": int(number), "kind": str(kind)}:
                self._lanes[kind].cancel(number)
            case {"end": float(drain_s) | int(drain_s)}:
                if self._ending is not None:
                    self._ending.cancel()
                self._ending = asyncio.create_task(self._end(drain_s))

    def _spawn(self, work: Any) -> None:
        self._background.add(asyncio.create_task(work))

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_STATE_S)
            self._tell({"state": self._state()})

    def _state(self) -> dict[str, Any]:
        """Return tokens so far, running requests, CPU seconds of the test, and the loop's samples since last."""
        samples, self._first.watch.samples = self._first.watch.samples, []
        return {
            "tokens": sum(lane.progress.tokens for lane in self._lanes.values()),
            "running": sum(lane.progress.running for lane in self._lanes.values()),
            "cpu_s": time.process_time() - self._cpu_before,
            "samples": samples,
        }

    async def _end(self, drain_s: float) -> None:
        await self._drain(drain_s)
        self._tell({"state": self._state()})
        self._tell({"ended": True})

    async def _drain(self, seconds: float) -> None:
        """Let sessions end within so many seconds; break off the others."""
        running = [task for lane in self._lanes.values() for task in lane.sessions]
        if running and seconds > 0:
            await asyncio.wait(running, timeout=seconds)
        running = [task for lane in self._lanes.values() for task in lane.sessions]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _main(link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link, limit=_LONGEST_LINE)

    def tell(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    try:
        sender = Sender(Settings(**json.loads(await reader.readline())), tell)
    except InflightError as error:
        tell({"error": str(error)})
    else:
        tell({"ready": True})
        await sender.serve(reader)
    writer.close()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; locust says how it ends
    asyncio.run(_main(socket.socket(fileno=int(sys.argv[1]))))
