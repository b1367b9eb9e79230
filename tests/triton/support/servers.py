"""Real servers for the tests, on free ports, with the demo deployment on any engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.installation import TritonInstallation, find_installation
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import load_deployment
from tests.support.waiting import wait_until
from tests.triton.support.metrics_page import read_page
from tests.trtllm.support.fake_package import InstallationWithFake

STEP_TOKENS = 64
"""The shared servers compute no more in one step, so that long prompts come in chunks."""
UPSTREAM_BACKEND = Path(__file__).parents[2] / "fakes/backends/tensorrtllm"


@dataclass(frozen=True)
class Running:
    """Where a test's server listens."""

    http_port: int
    grpc_port: int
    metrics_port: int
    server: TritonServer
    first_page: str = ""
    """Its metrics before any request."""

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


@contextmanager
def serve_command(directory: Path, said: Path) -> Iterator[list[int]]:
    """Run ``inflight serve`` and write its output to ``said``; when it is ready, yield its ports.

    They are those of HTTP, gRPC, metrics and the gateway.
    """
    ports = free_ports(4)
    command = [str(Path(sys.executable).with_name("inflight")), "serve", str(directory)]
    for name, port in zip(("http", "grpc", "metrics", "gateway"), ports, strict=True):
        command.append(f"--{name}-port={port}")
    environment = os.environ | {"XDG_STATE_HOME": str(directory / "state")}
    with said.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True, env=environment)
    try:
        assert wait_until(lambda: "Ctrl-C stops it" in said.read_text() or process.poll() is not None, 180)
        assert process.poll() is None, said.read_text()
        yield ports
    finally:
        process.terminate()
        process.wait()


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
        running = Running(http, grpc, metrics, server)
        page = read_page(running.metrics) if server.deployment.observability.metrics else ""
        yield replace(running, first_page=page)
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
    if kind == "replay":  # it computes nothing, in no type
        data["engine"].pop("dtype", None)
    if kind == "tensorrtllm":  # sizes and types are the compiled engine's own
        limits = {"max_seq_len": data.get("limits", {}).get("max_sequence_length", 1024)}
        write_engine(directory / "engine", **limits)
        data = {"model": data["model"], "engine": {"kind": kind}, "tensorrt_llm": {"engine_dir": "engine"}} | settings
    (directory / "deployment.yaml").write_text(yaml.safe_dump(data))
    return directory
