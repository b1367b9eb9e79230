"""All that one `inflight serve` runs: the server, the gateway beside it, and what says whether they are well."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from inflight.serve.gateway import GatewayProcess
from inflight.serve.installation import TritonInstallation
from inflight.serve.leftovers import sweep
from inflight.serve.metrics_page import MetricsPage, Source
from inflight.serve.server import TritonServer
from inflight.serve.status import State, Status
from inflight.serve.status_server import StatusServer
from inflight.serve.supervisor import Supervisor
from inflight.settings.deployment import Deployment


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
        self.status = Status(self._restarts)
        self.server = TritonServer(directory, deployment, installation)
        self.gateway = GatewayProcess(directory, deployment) if deployment.gateway.enabled else None
        self._supervisor = Supervisor(self.server, whole, self.status)
        self._status_server = self._make_status_server()

    def start(self, on_wait: Callable[[], None]) -> None:
        """Start all parts, and wait until a token has been generated; ``on_wait`` is called meanwhile.

        Raises:
            DeploymentError: a part cannot be started.
        """
        sweep()
        if self.gateway is not None:
            self.gateway.check()
        if self._status_server is not None:
            self._status_server.start()
        if self.gateway is not None:
            self.gateway.start()  # while the engine loads
        self._supervisor.start(on_wait)
        if self.gateway is not None:
            self.gateway.wait_ready()

    def keep_serving(self) -> None:
        """Keep all parts running, until interrupted.

        Raises:
            DeploymentError: the server ends again and again.
        """
        self._supervisor.keep_serving()

    def begin_stop(self) -> None:
        """Say that no more requests are to come, and give load balancers the time to notice."""
        serves = self.status.ready
        self.status.change(State.STOPPING)
        if serves:
            time.sleep(self.deployment.server.drain_delay_s)

    def stop(self) -> None:
        """End all parts, and remove what they leave. What runs has its time in all of them at once."""
        self.status.change(State.STOPPING)
        if self.gateway is not None:
            self.gateway.begin_stop()
        self.server.stop()
        if self.gateway is not None:
            self.gateway.stop()
        if self._status_server is not None:
            self._status_server.stop()

    def _restarts(self) -> dict[str, int]:
        own = {"gateway": self.gateway.restarts} if self.gateway is not None else {}
        return self.server.restarts.counts | own

    def _make_status_server(self) -> StatusServer | None:
        settings = self.deployment.server
        if settings.status_port is None:
            return None
        page = MetricsPage(self.status, self._sources()) if self.server.metrics else None
        return StatusServer(settings.host, settings.status_port, self.status, page)

    def _sources(self) -> dict[str, Source]:
        gateway = {"gateway": self.gateway.metrics} if self.gateway is not None else {}
        return {"triton": Source(self.server.metrics_url)} | gateway
