"""A stage that stands still for seconds, as on a machine that is too busy, is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from inflight.client import Client, GenerateOptions
from inflight.serve.command import override_server
from inflight.serve.server import TritonServer, free_ports
from inflight.settings.deployment import load_deployment
from tests.triton.support.servers import on_engine

pytestmark = pytest.mark.proof

STANDSTILL_S = 3.0
"""Longer than the second that Triton gives a stage by itself, and shorter than the ten that it is made to give."""
PATIENCE_S = 120.0


@pytest.fixture
def server(tmp_path: Path) -> TritonServer:
    directory = on_engine("replay", tmp_path, engine={"replay_step_ms": 5})
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    return TritonServer(directory, override_server(load_deployment(directory), ports))


def _stages(server: TritonServer) -> dict[str, psutil.Process]:
    """Return the processes of the stages that have become what they are, by name."""
    found: dict[str, psutil.Process] = {}
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # Triton starts shells, too, which end at once
            line = child.cmdline()
            if line and line[0].endswith("_stub"):
                found[Path(line[1]).parts[-3]] = child
    return found


def test_stages_that_stand_still_while_they_load_are_waited_for(server: TritonServer) -> None:
    stopped: dict[str, float] = {}

    def stop_each_once() -> None:
        for name, stage in _stages(server).items():
            if name not in stopped:  # however soon it has loaded its model
                stage.suspend()
                stopped[name] = time.monotonic()
            elif name in stopped and time.monotonic() > stopped[name] + STANDSTILL_S:
                stage.resume()

    with server:
        process = server.process
        server.wait_ready(PATIENCE_S, stop_each_once)
        assert len(stopped) == 3
        assert server.process is process, "it was started again"
        with Client(f"127.0.0.1:{server.settings.grpc_port}") as client:
            assert client.generate("hello", GenerateOptions(max_tokens=4)).finish_reason in ("stop", "length")


@pytest.mark.parametrize("name", ["tokenizer", "tensorrt_llm", "detokenizer"])
def test_a_stage_that_stands_still_under_load_is_waited_for(name: str, server: TritonServer) -> None:
    """Nobody watches this server: `inflight serve` starts one again whose stage alone stands still for 3 s."""
    options = GenerateOptions(max_tokens=400, ignore_eos=True)
    with server:
        server.wait_ready(PATIENCE_S)
        stage = _stages(server)[name]
        with Client(f"127.0.0.1:{server.settings.grpc_port}") as client, client.stream("hello", options) as stream:
            next(iter(stream))
            stage.suspend()
            goes_on = threading.Timer(STANDSTILL_S, stage.resume)
            goes_on.start()
            client.generate("hello", replace(options, max_tokens=4))
            for _ in stream:
                pass
            goes_on.join()
            assert stream.completion().finish_reason == "length"
        assert server.process.poll() is None
