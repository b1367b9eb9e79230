"""How long a server may take until it is ready, and what is said when it takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve.installation import TritonInstallation
from inflight.serve.scratch import temporary_directory
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import resolve


def test_a_server_that_is_not_ready_in_time_names_the_setting() -> None:
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "start_timeout_s": 1}
    deployment = resolve({"model": str(DEMO / "model"), "server": ports}, DEMO, "test")
    server = TritonServer(DEMO, deployment, TritonInstallation(Path(), Path(), Path(), ()))
    server._runtime = temporary_directory("inflight-")
    server.log_path.write_text("2026-01-01 00:00:00,000 INFO inflight.engine.shards: loading model.safetensors\n")
    server._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        with pytest.raises(
            DeploymentError,
            match=r"was not ready within 1 s \(server.start_timeout_s\): its stages said "
            r"last: loading model\.safetensors",
        ):
            server.wait_ready()
    finally:
        server.stop(at_once=True)
