"""A deployment served by Triton and by the gateway beside it, on free ports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from inflight.serve.gateway import GatewayProcess
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import FILE_NAME, load_deployment

KEY = "a-key-of-the-measurements"


@dataclass(frozen=True)
class Served:
    """Where both listen."""

    server: TritonServer
    gateway: GatewayProcess

    @property
    def url(self) -> str:
        """The gateway's, as ``http://127.0.0.1:8080``."""
        return self.gateway.url

    @property
    def grpc(self) -> str:
        """Triton's, as ``127.0.0.1:8001``."""
        return f"{self.server.settings.host}:{self.server.settings.grpc_port}"

    @property
    def metrics(self) -> str:
        """Triton's page of metrics."""
        return f"http://{self.server.settings.host}:{self.server.settings.metrics_port}/metrics"

    def logs(self) -> str:
        """Return what both have logged."""
        return "\n".join(path.read_text(errors="replace") for path in (self.server.log_path, self.gateway.log_path))


@contextmanager
def serve(settings: Mapping[str, Any], keys: bool = False) -> Iterator[Served]:
    """Serve a deployment with these settings; with ``keys`` the gateway wants ``KEY``.

    Raises:
        DeploymentError: one of them could not be started; the message says why.
    """
    http, grpc, metrics, openai = free_ports(4)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": 5}
    front = {"port": openai} | ({"api_keys_file": "keys"} if keys else {})
    whole = dict(settings) | {"server": ports, "gateway": front | settings.get("gateway", {})}
    with tempfile.TemporaryDirectory(prefix="inflight-gateway-") as directory:
        folder = Path(directory)
        (folder / "keys").write_text(f"{KEY}\n")
        (folder / FILE_NAME).write_text(yaml.safe_dump(whole))
        yield from _serve(folder)


def _serve(folder: Path) -> Iterator[Served]:
    deployment = load_deployment(folder)
    gateway = GatewayProcess(folder, deployment)
    with TritonServer(folder, deployment) as server:
        try:
            gateway.start()
            server.wait_ready()
            gateway.wait_ready()
            yield Served(server, gateway)
        finally:
            gateway.stop()
