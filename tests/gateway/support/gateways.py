"""Real gateways for the tests: in this process on a real socket, or as a process beside a real server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from inflight.gateway.__main__ import KEEP_ALIVE_S, GatewayServer
from inflight.gateway.app import ROUTES, Served, make_app
from inflight.gateway.context import Gateway, make_gateway
from inflight.gateway.protocol import GatewayConfig
from inflight.resources import DEMO
from inflight.serve.gateway import GatewayProcess
from inflight.serve.server import free_ports
from inflight.settings.deployment import load_deployment
from inflight.settings.gateway import GatewaySettings
from tests.triton.support.servers import Running, run


@dataclass(frozen=True)
class Inside:
    """A gateway in this process, on a real socket; its engine's port is closed."""

    port: int
    gateway: Gateway
    server: GatewayServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it runs on."""
        task = self.gateway.readiness._task
        assert task is not None
        return task.get_loop()

    @property
    def patience_s(self) -> float:
        """What a client has for a part of a body, and to take an answer."""
        return self.gateway.settings.client_timeout_s

    def advance(self, seconds: float) -> None:
        """Have the clock of the event loop go on by so much, and let the loop do what is due and what has come.

        So a test waits for no time-out, and none is over before the test wants it, however busy the machine is.
        """
        asyncio.run_coroutine_threadsafe(_advance(self.loop, seconds), self.loop).result(60)

    def client(self, **settings: Any) -> httpx.Client:
        """Return a client whose connections are its own."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **settings)


async def _advance(loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    clock = loop.time
    loop.time = lambda: clock() + seconds  # type: ignore[method-assign]
    for _ in range(10):
        await asyncio.sleep(0)


class Held:
    """An endpoint whose requests are answered as soon as ``free`` is set, and not before."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.route = Served("GET", "/held", self.endpoint)

    async def endpoint(self, request: Request) -> Response:
        """Answer."""
        while not self.free.is_set():
            await asyncio.sleep(0.01)
        return JSONResponse({})


@dataclass(frozen=True)
class Beside:
    """A gateway's process beside a server with the demo."""

    process: GatewayProcess
    triton: Running

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def log(self) -> str:
        return self.process.log_path.read_text(errors="replace")

    def client(self, **settings: Any) -> httpx.Client:
        """Return a client whose connections are its own."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **settings)


@contextmanager
def inside(
    *more: Served,
    ready: bool = False,
    exit_timeout_s: int = 5,
    most_connections: int = 1000,
    sections: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[Inside]:
    """Serve the demo's routes, and ``more``, with these settings of ``gateway``.

    Args:
        more: further routes.
        ready: whether routes that need the engine are let through, as if it answered.
        exit_timeout_s: what runs at the end has so long.
        most_connections: are open at once.
        sections: values of other sections of the deployment.
        settings: of the section ``gateway``; nobody waits for the engine unless they say so.
    """
    port, closed = free_ports(2)
    given = load_deployment(DEMO)
    changed = {name: getattr(given, name).model_copy(update=values) for name, values in (sections or {}).items()}
    given = given.model_copy(update=changed)
    server = given.server.model_copy(update={"grpc_port": closed, "exit_timeout_s": exit_timeout_s})
    chosen = GatewaySettings.model_validate({"port": port, "engine_wait_s": 0, **settings})
    gateway = make_gateway(given.model_copy(update={"server": server, "gateway": chosen}))
    app = make_app(gateway, (*ROUTES, *more))
    config = GatewayConfig(
        app,
        chosen.client_timeout_s,
        most_connections,
        port=port,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    if ready:  # before it looks for the first time: a look that is under way would say that the engine is away
        gateway.readiness.look = _always_ready  # type: ignore[method-assign]
        gateway.readiness.show(True)
    running = GatewayServer(config, gateway)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    try:
        until(lambda: running.started)
        yield Inside(port, gateway, running)
    finally:
        running.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


async def _always_ready() -> None:
    """Look at no engine."""


@contextmanager
def process_alone() -> Iterator[GatewayProcess]:
    """Start the gateway's process for the demo, without an engine."""
    (port,) = free_ports(1)
    deployment = load_deployment(DEMO)
    chosen = deployment.gateway.model_copy(update={"port": port})
    process = GatewayProcess(DEMO, deployment.model_copy(update={"gateway": chosen}))
    process.start()
    try:
        process.wait_ready()
        yield process
    finally:
        process.stop()


@contextmanager
def beside(directory: Path = DEMO, gateway: dict[str, Any] | None = None, **settings: Any) -> Iterator[Beside]:
    """Serve a deployment and start its gateway beside it, with these settings of ``gateway``."""
    (port,) = free_ports(1)
    chosen = GatewaySettings.model_validate({"port": port, **(gateway or {})})
    with contextlib.contextmanager(run)(directory, gateway=chosen, **settings) as running:
        process = GatewayProcess(directory, running.server.deployment)
        process.start()
        try:
            process.wait_ready()
            yield Beside(process, running)
        finally:
            process.stop()


def until(condition: Any, timeout_s: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come to hold"
        time.sleep(0.02)


def rest_of(connection: socket.socket) -> bytes:
    """Return all that comes until the connection ends, which it must."""
    answer = b""
    with suppress(ConnectionError):
        while more := connection.recv(65536):
            answer += more
    return answer


def drips(running: Inside, connection: socket.socket, drop: bytes, most: int) -> int:
    """Send a drop each second of the server's clock; return how many of at most ``most`` it took."""
    sent = 0
    with suppress(ConnectionError):
        while sent < most:
            running.advance(1)
            connection.sendall(drop)
            sent += 1
    return sent
