"""Real servers for the tests: one streaming and one unary, each with the demo deployment, on free ports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from inflight.deployment import load_deployment
from inflight.serve.command import DEMO, override_server
from inflight.serve.server import TritonServer, free_ports


@dataclass(frozen=True)
class Running:
    """Where a test's server listens."""

    http_port: int
    grpc_port: int
    metrics_port: int
    server: TritonServer

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}/metrics"

    @property
    def log(self) -> str:
        return self.server.log_path.read_text(errors="replace")


def run(directory: Path = DEMO, **settings: object) -> Iterator[Running]:
    """Serve ``directory`` with other values of its top-level settings; yield it; stop it."""
    http, grpc, metrics = free_ports(3)
    deployment = override_server(
        load_deployment(directory),
        {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": 10},
    )
    server = TritonServer(directory, deployment.model_copy(update=settings))
    with server:
        server.wait_ready(60)
        yield Running(http, grpc, metrics, server)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    yield from run()


@pytest.fixture(scope="session")
def unary_server() -> Iterator[Running]:
    yield from run(decoupled=False)
