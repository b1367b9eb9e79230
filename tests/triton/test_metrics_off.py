"""Without metrics nothing listens on their port; all else is as ever."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.client import Client, GenerateOptions
from inflight.serve.server import free_ports
from tests.triton.support.servers import on_engine


@pytest.mark.proof
@pytest.mark.parametrize("by_option", [False, True], ids=["deployment", "option"])
def test_observability_metrics_false_closes_the_page(by_option: bool, tmp_path: Path) -> None:
    """Their port may be in use by another: nothing of this server needs it."""
    directory = on_engine("replay", tmp_path, observability={"metrics": by_option})
    http, grpc = free_ports(2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(other.getsockname()[1])]
        command = [str(Path(sys.executable).with_name("inflight")), "serve", str(directory), *ports, "--no-gateway"]
        command += ["--no-metrics"] if by_option else []
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            banner = []
            for line in process.stderr:
                banner.append(line)
                if line.startswith("Ctrl-C"):
                    break
            assert "  metrics  off\n" in banner
            with Client(f"127.0.0.1:{grpc}") as client:
                assert client.generate("Hi", GenerateOptions(max_tokens=3, ignore_eos=True)).text
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
