"""Upstream's C++ backend in the tests: a deployment of an engine for it, and a Triton that has a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from inflight.deployment import load_deployment
from inflight.resources import DEMO
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from tests.triton.conftest import Running, installation, write_engine


def write_deployment(directory: Path, **settings: Any) -> Path:
    """Write a deployment of the demo model's engine for upstream's backend."""
    write_engine(directory / "engine")
    base = {"model": str(DEMO / "model"), "engine": {"kind": "tensorrtllm"}, "tensorrt_llm": {"engine_dir": "engine"}}
    (directory / "deployment.yaml").write_text(yaml.safe_dump(base | settings))
    return directory


def serve(directory: Path, tmp_path: Path) -> Iterator[Running]:
    """Serve a deployment on a Triton that has the stand-in where NVIDIA's image has the backend."""
    (tmp_path / "backends").mkdir()
    found = installation("tensorrtllm", tmp_path / "backends")
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    deployment = override_server(load_deployment(directory), {**ports, "exit_timeout_s": 10})
    server = TritonServer(directory, deployment, found)
    with server:
        server.wait_ready(180)
        yield Running(*ports.values(), server)
