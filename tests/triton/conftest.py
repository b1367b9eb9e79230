"""Real servers for the tests, on free ports: streaming and unary, with the demo deployment on either engine.

What takes ``server`` or ``unary_server`` runs twice: on the portable engine and, against the fake TensorRT-LLM, on
``trtllm``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from inflight.deployment import load_deployment
from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.installation import find_installation
from inflight.serve.server import TritonServer, free_ports
from tests.trtllm.fake import InstallationWithFake


@dataclass(frozen=True)
class Running:
    """Where a test's server listens."""

    http_port: int
    grpc_port: int
    metrics_port: int
    server: TritonServer

    @property
    def engine(self) -> str:
        """``engine.kind`` of what it serves."""
        return self.server.deployment.engine.kind

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


def run(directory: Path = DEMO, exit_timeout_s: int = 10, **settings: object) -> Iterator[Running]:
    """Serve ``directory`` with other values of its top-level settings; yield it; stop it."""
    http, grpc, metrics = free_ports(3)
    deployment = override_server(
        load_deployment(directory),
        {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": exit_timeout_s},
    )
    deployment = deployment.model_copy(update=settings)
    installation = InstallationWithFake.find() if deployment.engine.kind == "trtllm" else find_installation()
    server = TritonServer(directory, deployment, installation)
    with server:
        try:
            server.wait_ready(180)
        except DeploymentError:
            print(server.log_path.read_text(errors="replace"))  # gone with the server; pytest shows what was printed
            raise
        yield Running(http, grpc, metrics, server)


def on_engine(kind: str, directory: Path, **settings: object) -> Path:
    """Write the demo deployment for an engine, with more settings, into ``directory``; return it."""
    data = yaml.safe_load((DEMO / "deployment.yaml").read_text()) | {"model": str(DEMO / "model")} | settings
    data["engine"] |= {"kind": kind}
    (directory / "deployment.yaml").write_text(yaml.safe_dump(data))
    return directory


@pytest.fixture(scope="session", params=["pytorch", pytest.param("trtllm", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> str:
    """``engine.kind`` of the servers."""
    return str(request.param)


@pytest.fixture(scope="session")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine(engine, tmp_path_factory.mktemp(engine)))


@pytest.fixture(scope="session")
def unary_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine(engine, tmp_path_factory.mktemp(engine)), decoupled=False)


@pytest.fixture(autouse=True)
def _shared_servers_run(request: pytest.FixtureRequest) -> None:
    """Start a shared server again that ended in an earlier test: that one has failed, and the others need not."""
    for name in ("server", "unary_server"):
        shared = request.getfixturevalue(name) if name in request.fixturenames else None
        if isinstance(shared, Running) and shared.server.process.poll() is not None:
            shared.server.stop(at_once=True)
            shared.server.start()
            shared.server.wait_ready(180)
