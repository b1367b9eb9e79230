"""The end of a real server: kept connections do not delay it, running streams are finished, and nothing is left."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import httpx
import psutil
import pytest

from inflight.client.request import GenerateOptions
from inflight.client.sync import Client, HttpClient
from inflight.serve.server import free_ports
from tests.triton.support.servers import Running, on_engine, run

INFLIGHT = str(Path(sys.executable).with_name("inflight"))
SHARED_MEMORY = Path("/dev/shm")
EXIT_TIMEOUT_S = 240
"""A server that waits for kept connections takes this long; a busy machine unloads the stages in less than half."""
QUESTION = "What is in-flight batching?"
LONG = GenerateOptions(max_tokens=200, ignore_eos=True)
ASK = {"text_input": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}


REPLAY = {"kind": "replay", "replay_step_ms": 10}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    # The exit timeout is longer than a busy machine takes to unload the stages.
    yield from run(on_engine("replay", tmp_path, engine=REPLAY), exit_timeout_s=60)


def _keep_alive(port: int, path: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", path)
    connection.getresponse().read()
    assert connection.sock is not None, "the server has closed it"
    return connection


def _scrape(port: int, path: str) -> None:
    """Ask again and again over one connection, as Prometheus does, until the server has gone."""
    connection = _keep_alive(port, path)
    with contextlib.suppress(OSError, http.client.HTTPException):
        while True:
            time.sleep(0.3)
            connection.request("GET", path)
            connection.getresponse().read()


def _shared_memory(*processes: int) -> list[Path]:
    return [file for process in processes for file in SHARED_MEMORY.glob(f"*inflight_{process}_*")]


@pytest.mark.proof
def test_kept_connections_do_not_delay_it(tmp_path: Path) -> None:
    http_port, grpc_port, metrics_port, gateway_port = free_ports(4)
    ports = [f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    ports.append(f"--gateway-port={gateway_port}")
    patient = str(on_engine("replay", tmp_path, engine=REPLAY, server={"exit_timeout_s": EXIT_TIMEOUT_S}))
    process = subprocess.Popen(
        [INFLIGHT, "serve", patient, *ports], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert any("Ctrl-C stops it" in line for line in process.stderr)
    idle = [_keep_alive(http_port, "/v2/health/ready"), _keep_alive(metrics_port, "/metrics")]
    idle.append(_keep_alive(gateway_port, "/health"))
    scraper = threading.Thread(target=_scrape, args=(http_port, "/v2/health/ready"))
    scraper.start()
    children = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(EXIT_TIMEOUT_S + 60) == 0
    assert time.monotonic() - began < EXIT_TIMEOUT_S / 2
    assert process.stderr.read() == "stopping\n"
    left = psutil.wait_procs(children, timeout=30)[1]
    assert all(one.status() == psutil.STATUS_ZOMBIE for one in left), "a stage runs on"
    assert not _shared_memory(process.pid, *(child.pid for child in children))
    assert idle[0].sock.recv(1) == b""
    scraper.join()


@pytest.mark.proof
@pytest.mark.parametrize("transport", [Client, HttpClient], ids=["grpc", "http"])
def test_running_streams_are_finished(running: Running, transport: type[Client] | type[HttpClient]) -> None:
    """The server is idle as soon as they have ended, and not before."""
    assert "--metrics-interval-ms=500" in cast(list[str], running.server.process.args), "it may wait so long at its end"
    codes: list[int | None] = []
    stop = threading.Thread(target=lambda: codes.append(running.server.stop()))
    with transport(running.grpc if transport is Client else running.http) as client:
        whole = client.generate(QUESTION, LONG).text
        with client.stream(QUESTION, LONG) as stream:
            text = next(iter(stream)).text
            stop.start()
            text += "".join(chunk.text for chunk in stream)
    stop.join()
    assert codes in ([0], [-signal.SIGABRT]), "Triton aborts where the machine stands still while a stage unloads"
    assert text == whole


@pytest.mark.proof
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_killed_server_leaves_no_stage(running: Running, busy: bool) -> None:
    server = running.server.process
    stages = psutil.Process(server.pid).children(recursive=True)
    assert len(stages) == 3
    if busy:
        url = f"{running.http}/v2/models/ensemble/generate_stream"
        with httpx.stream("POST", url, json=ASK, timeout=60) as response:
            next(response.iter_text())
            server.kill()
    server.kill()
    assert not psutil.wait_procs(stages, timeout=50)[1], "one that is caught as soon as it has loaded has 30 s"
    # Its supervisor removes what is left: the kernel ends a stage that gets no processor for three seconds.
    running.server.stop(at_once=True)
    assert not _shared_memory(server.pid, os.getpid())
