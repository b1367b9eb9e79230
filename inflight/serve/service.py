"""All that one `inflight serve` runs: the server, the gateway beside it, the door before them, and what tells of them.

With the door, clients meet Envoy alone, on the deployment's ports. What is behind it listens on ports of this machine
alone, which stay the same however often it is started again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from inflight.serve.door import DoorProcess, Upstreams
from inflight.serve.gateway import GatewayProcess
from inflight.serve.installation import TritonInstallation
from inflight.serve.leftovers import sweep
from inflight.serve.metrics_page import SOURCE_S, MetricsPage, Page, read_page
from inflight.serve.server import TritonServer, free_ports
from inflight.serve.status import State, Status
from inflight.serve.status_server import StatusServer
from inflight.serve.supervisor import Supervisor
from inflight.settings.deployment import Deployment

log = logging.getLogger(__name__)

_INSIDE = "127.0.0.1"


class Service:
    """Starts the parts in the order in which they need each other, and ends them in the order that loses nothing."""

    def __init__(
        self,
        directory: Path,
        deployment: Deployment,
        installation: TritonInstallation,
        whole: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``deployment`` is that of ``directory``, with the command's overrides; ``whole`` as in ``Supervisor``."""
        self.deployment = deployment
        self.status = Status(self._restarts, self._gateway_answers)
        inner = behind_the_door(deployment) if deployment.door.enabled else deployment
        self.server = TritonServer(directory, inner, installation)
        ports = deployment.server.http_port, deployment.gateway.port
        self.gateway = GatewayProcess(directory, inner, ports[1]) if inner.gateway.enabled else None
        self._supervisor = Supervisor(self.server, whole, self.status, ports[0])
        self._status_servers = self._make_status_servers()
        self._door = self._make_door()

    def start(self, on_wait: Callable[[], None]) -> None:
        """Start all parts, and wait until a token has been generated; ``on_wait`` is called meanwhile.

        Raises:
            DeploymentError: a part cannot be started.
        """
        sweep()
        for part in (self.gateway, self._door):
            if part is not None:
                part.check()
        for early in (*self._status_servers, self._door, self.gateway):  # while the engine loads
            if early is not None:
                early.start()
        if self._door is not None:
            self._door.wait_ready()
        self._supervisor.start(on_wait)
        if self.gateway is not None:
            self.gateway.wait_ready()

    def keep_serving(self) -> None:
        """Keep all parts running, until interrupted.

        Raises:
            DeploymentError: the server ends again and again.
        """
        self._supervisor.keep_serving()

    def drain(self) -> None:
        """Say that no more requests are to come, and give load balancers the time to notice."""
        served = self.status.state is State.READY
        self.status.change(State.STOPPING)
        if served:
            time.sleep(self.deployment.server.drain_delay_s)

    def stop(self) -> None:
        """Admit no more, end all parts, and remove what they leave. What runs has its time in all of them at once."""
        self.status.change(State.STOPPING)
        deadline = time.monotonic() + self.deployment.server.exit_timeout_s
        self._close_the_door()
        if self.gateway is not None:
            self.gateway.begin_stop()
        self.server.stop()
        if self.gateway is not None:
            self.gateway.stop()
        if self._door is not None:
            self._door.wait_idle(deadline - time.monotonic())  # of what it has had, clients may not have read all
            self._door.stop()
        for one in self._status_servers:
            one.stop()

    def _close_the_door(self) -> None:
        if self._door is not None and self._door.runs:
            try:
                self._door.begin_drain()
            except OSError as error:  # the disk is full: then what is behind it refuses
                log.warning("the door takes requests until it ends: %s", error.strerror)

    def _gateway_answers(self) -> bool:
        return self.gateway is None or self.gateway.is_up

    def _restarts(self) -> dict[str, int]:
        beside = {"gateway": self.gateway, "door": self._door}
        counts = {name: part.restarts for name, part in beside.items() if part is not None}
        return self.server.restarts.counts | counts

    def _make_status_servers(self) -> list[StatusServer]:
        """Return what tells the status: first the one that the door asks, where there is a door.

        Clients find it on ``status_port`` too, unless they need a key elsewhere: that port has only probes then.
        """
        settings, asks = self.deployment.server, asks_clients(self.deployment)
        page = MetricsPage(self.status, self._pages()) if self.server.metrics else None
        made = []
        if self.deployment.door.enabled and (asks or settings.status_port is None):
            made.append(StatusServer(_INSIDE, free_ports(1, _own_ports(self.deployment))[0], self.status, page))
        if settings.status_port is not None:
            shown = None if asks else page
            made.append(StatusServer(settings.host, settings.status_port, self.status, shown, probes_only=asks))
        return made

    def _pages(self) -> dict[str, Page]:
        pages: dict[str, Page] = {"triton": partial(read_page, self.server.metrics_url)}
        if self.gateway is not None:
            pages["gateway"] = self.gateway.metrics
        if self.deployment.door.enabled:
            pages["door"] = self._door_page
        return pages

    def _door_page(self) -> str | None:
        return self._door.metrics(SOURCE_S) if self._door is not None and self._door.runs else None

    def _make_door(self) -> DoorProcess | None:
        if not self.deployment.door.enabled:
            return None
        inner = self.server.settings
        gateway = None if self.gateway is None else self.gateway.address
        http, grpc = (f"{_INSIDE}:{port}" for port in (inner.http_port, inner.grpc_port))
        return DoorProcess(self.deployment, Upstreams(http, grpc, gateway, self._status_servers[0].address))


def behind_the_door(deployment: Deployment) -> Deployment:
    """Return the deployment as what is behind the door serves it: on this machine alone, on free ports."""
    http, grpc, metrics, gateway = free_ports(4, _own_ports(deployment))
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    return deployment.model_copy(
        update={
            "server": deployment.server.model_copy(update={"host": _INSIDE, **ports}),
            "gateway": deployment.gateway.model_copy(update={"host": None, "port": gateway}),
        }
    )


def asks_clients(deployment: Deployment) -> bool:
    """Return whether a part of the deployment asks clients for a key, a token or a certificate."""
    door, gateway = deployment.door, deployment.gateway
    by_door = door.enabled and (door.asks or door.tls.client_ca is not None)
    return by_door or (gateway.enabled and gateway.api_keys_file is not None)


def _own_ports(deployment: Deployment) -> set[int | None]:
    """Return the ports that the deployment itself names."""
    server = deployment.server
    return {
        server.http_port,
        server.grpc_port,
        server.metrics_port,
        server.status_port,
        deployment.gateway.port,
    }
