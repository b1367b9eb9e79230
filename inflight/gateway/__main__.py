"""The gateway's process: ``python -m inflight.gateway DEPLOYMENT [--sections JSON] [--kept]``.

`inflight serve` starts it.

At SIGTERM it takes no more requests, gives those that run ``server.exit_timeout_s``, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from inflight import logs
from inflight.errors import DeploymentError
from inflight.gateway.app import make_app
from inflight.gateway.context import Gateway, make_gateway
from inflight.gateway.protocol import GatewayConfig
from inflight.settings.deployment import Deployment, load_deployment

log = logging.getLogger("inflight.gateway")

KEEP_ALIVE_S = 75
"""Seconds that a connection stays open without a request: longer than the clients' own limits, which are 60 at most."""
_IDLE_CONNECTIONS = 4096
"""Connections that may be open beside those with a request."""
_OTHER_FILES = 128
"""Files that the process has open beside connections, at most."""
_UNCLEAN_S = 2
"""Seconds that uvicorn gives to what still runs when all have had their time."""
_SWITCH_S = 0.0005
"""Seconds that another thread runs on while the event loop's waits; Python's own value is ten times as much."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GatewayServer(uvicorn.Server):
    """uvicorn's server, which drains before it shuts down."""

    def __init__(self, config: GatewayConfig, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._draining: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Have the signals that stop the process drain it first, in place of uvicorn's own way."""
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, self.drain)
        yield

    def drain(self) -> None:
        """Take no more requests, and end when those that run have ended or had their time."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="drain")

    async def _drain(self) -> None:
        timeout_s = self._gateway.deployment.server.exit_timeout_s
        log.info("stopping; %d requests run, and have %d s", self._gateway.load.running, timeout_s)
        self._gateway.readiness.give_up()  # an engine that goes away now does not come back
        await self._gateway.load.drain(timeout_s)
        self.should_exit = True


def make_server(deployment: Deployment, *, kept: bool = False) -> GatewayServer:
    """Return the server of a deployment, on ``gateway.host`` or ``server.host``, and ``gateway.port``.

    Args:
        deployment: the deployment.
        kept: as in ``make_gateway``.

    Raises:
        DeploymentError: the deployment cannot be served.
    """
    settings, gateway = deployment.gateway, make_gateway(deployment, kept=kept).with_fork_server()
    config = GatewayConfig(
        make_app(gateway),
        settings.client_timeout_s,
        _most_connections(settings.max_concurrent_requests),
        host=(settings.host or deployment.server.host).strip("[]"),
        port=settings.port,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=_UNCLEAN_S,
    )
    return GatewayServer(config, gateway)


def _most_connections(requests: int) -> int:
    """Return how many connections there may be, and let this process open as many files where it may."""
    wanted = requests + _IDLE_CONNECTIONS
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < wanted + _OTHER_FILES:
        files = min(wanted + _OTHER_FILES, most_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))
    return max(1, min(wanted, files - _OTHER_FILES))


def with_sections(deployment: Deployment, sections: dict[str, dict[str, Any]]) -> Deployment:
    """Return the deployment with these sections, by name, in place of its own."""
    found = {name: type(getattr(deployment, name)).model_validate(values) for name, values in sections.items()}
    return deployment.model_copy(update=found)


def main(arguments: list[str] | None = None) -> int:
    """Serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m inflight.gateway", description="Serve OpenAI's API.")
    parser.add_argument("deployment", type=Path, help="the deployment's directory")
    parser.add_argument("--sections", default="{}", help="JSON: sections that replace those of deployment.yaml")
    parser.add_argument(
        "--kept", action="store_true", help="wait for the engine until SIGTERM, which comes when it is given up"
    )
    given = parser.parse_args(arguments)
    try:
        deployment = with_sections(load_deployment(given.deployment), json.loads(given.sections))
        logs.configure(deployment.observability)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        server = make_server(deployment, kept=given.kept)
    except DeploymentError as error:
        print(f"inflight.gateway: {error}", file=sys.stderr)
        return 1
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()  # what is there now stays, and each look of the garbage collector at it would hold up all streams
    server.run()
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
