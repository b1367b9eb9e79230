"""Real servers for the tests, on free ports: streaming and unary, with the demo deployment on either engine.

What takes ``server`` or ``unary_server`` runs twice: on the portable engine and, against the fake TensorRT-LLM, on
``trtllm``. What is marked ``any_engine`` runs on the stand-in for upstream's C++ backend too, ``tensorrtllm``.
"""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx._transports.default
import psutil
import pytest
import yaml

from inflight.deployment import load_deployment
from inflight.errors import DeploymentError
from inflight.pulse import read_pulses
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.installation import TritonInstallation, find_installation
from inflight.serve.server import TritonServer, free_ports
from tests.conftest import SERVER_ENDED
from tests.trtllm.fake import InstallationWithFake

# Each call of httpx would read all certificates of this machine, for 40 ms; what is called here has none.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)

UPSTREAM_BACKEND = Path(__file__).parents[1] / "fakes/backends/tensorrtllm"


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


def run(
    directory: Path = DEMO, exit_timeout_s: int = 10, in_order: bool = False, **settings: object
) -> Iterator[Running]:
    """Serve ``directory`` with other values of its top-level settings; yield it; end it, at once or ``in_order``."""
    http, grpc, metrics = free_ports(3)
    deployment = override_server(
        load_deployment(directory),
        {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "exit_timeout_s": exit_timeout_s},
    )
    deployment = deployment.model_copy(update=settings)
    with tempfile.TemporaryDirectory() as backends:
        server = TritonServer(directory, deployment, installation(deployment.engine.kind, Path(backends)))
        yield from _serve(server, http, grpc, metrics, in_order)


def installation(kind: str, backends: Path) -> TritonInstallation:
    """Return the embedded server with what stands in for TensorRT-LLM; ``backends`` is an empty directory."""
    if kind == "trtllm":
        return InstallationWithFake.find()
    found = find_installation()
    if kind != "tensorrtllm":
        return found
    (backends / "python").symlink_to(found.python_backend)
    (backends / "tensorrtllm").symlink_to(UPSTREAM_BACKEND)
    return replace(found, python_backend=backends / "python")


def _serve(server: TritonServer, http: int, grpc: int, metrics: int, in_order: bool) -> Iterator[Running]:
    try:
        server.start()
        try:
            server.wait_ready(180)
        except DeploymentError:
            print(server.log_path.read_text(errors="replace"))  # gone with the server; pytest shows what was printed
            raise
        yield Running(http, grpc, metrics, server)
    finally:
        server.stop(at_once=not in_order)


def write_engine(
    directory: Path,
    ranks: int = 1,
    heads: dict[str, int] | None = None,
    use_paged_context_fmha: bool = True,
    **build: Any,
) -> Path:
    """Write an engine's directory, as trtllm-build leaves it, without code; ``heads`` are those of its drafts."""
    directory.mkdir(parents=True, exist_ok=True)
    build_config = {"max_batch_size": 32, "max_num_tokens": 512, "max_seq_len": 1024, "max_draft_len": 0} | build
    build_config["plugin_config"] = {"use_paged_context_fmha": use_paged_context_fmha, "tokens_per_block": 32}
    pretrained = {"mapping": {"world_size": ranks, "tp_size": ranks, "pp_size": 1}, "quantization": {}} | (heads or {})
    config = {"version": "1.2.1", "pretrained_config": pretrained, "build_config": build_config}
    (directory / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (directory / f"rank{rank}.engine").write_bytes(b"engine")
    return directory


def on_engine(kind: str, directory: Path, **settings: object) -> Path:
    """Write the demo deployment for an engine, with more settings, into ``directory``; return it."""
    data = yaml.safe_load((DEMO / "deployment.yaml").read_text()) | {"model": str(DEMO / "model")} | settings
    data["engine"] |= {"kind": kind}
    if kind == "tensorrtllm":  # sizes and types are the compiled engine's own
        limits = {"max_seq_len": data.get("limits", {}).get("max_sequence_length", 1024)}
        write_engine(directory / "engine", **limits)
        data = {"model": data["model"], "engine": {"kind": kind}, "tensorrt_llm": {"engine_dir": "engine"}} | settings
    (directory / "deployment.yaml").write_text(yaml.safe_dump(data))
    return directory


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out on ``tensorrtllm`` what is not promised there."""

    def promised(item: pytest.Item) -> bool:
        engine = getattr(item, "callspec", None) and item.callspec.params.get("engine")  # type: ignore[attr-defined]
        return engine != "tensorrtllm" or item.get_closest_marker("any_engine") is not None

    items[:] = filter(promised, items)


KINDS = ["pytorch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("trtllm", "tensorrtllm"))]


@pytest.fixture(scope="session", params=KINDS)
def engine(request: pytest.FixtureRequest) -> str:
    """``engine.kind`` of the servers."""
    return str(request.param)


@pytest.fixture(scope="session")
def server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine(engine, tmp_path_factory.mktemp(engine)))


@pytest.fixture(scope="session")
def unary_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    yield from run(on_engine(engine, tmp_path_factory.mktemp(engine), decoupled=False))


@pytest.fixture(scope="session")
def narrow_server(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """It runs one sequence at a time and lets two wait."""
    yield from run(
        on_engine(engine, tmp_path_factory.mktemp(engine), batching={"max_batch_size": 1, "max_queue_size": 2})
    )


@pytest.fixture(autouse=True)
def _shared_servers_run(request: pytest.FixtureRequest) -> None:
    """Start a shared server again of which a part has ended: the test before has failed, others need not."""
    for name in ("server", "unary_server", "narrow_server"):
        shared = request.getfixturevalue(name) if name in request.fixturenames else None
        if isinstance(shared, Running) and (ended := _ended(shared.server)):
            last = "\n".join(shared.log.splitlines()[-30:])
            warnings.warn(f"{ended} of a shared server has ended; its log said last:\n{last}", stacklevel=1)
            shared.server.stop(at_once=True)
            shared.server.start()
            shared.server.wait_ready(180)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that a server of a failed test, or a stage of it, has ended."""
    report = yield
    arguments = getattr(item, "funcargs", {}).values()
    if report.failed and any(isinstance(one, Running) and _ended(one.server) for one in arguments):
        item.stash[SERVER_ENDED] = True
    return report


def _ended(server: TritonServer) -> str:
    """Return what of a server has ended that no test has stopped: the server itself, or one of its stages."""
    if server._process is None:  # a test has stopped it
        return ""
    if server._process.poll() is not None:
        return "the process"
    for process, (stage, _) in read_pulses(server._process.pid).items():
        try:
            ended = psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        if ended:
            return f"the stage {stage}"
    return ""
