"""Ports for servers that start later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve.server import free_ports
from inflight.serve.service import behind_the_door
from inflight.settings.deployment import load_deployment


def test_they_are_distinct_below_those_of_outgoing_connections_and_free() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(9)
    assert len(set(ports)) == 9
    assert all(1024 < port < min(lowest, 32_768) for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in {port for _ in range(10) for port in free_ports(3)}


def test_none_of_those_that_are_kept_is_given_away() -> None:
    kept = free_ports(5)  # few at once: servers of other tests may have some
    assert not set(free_ports(4, kept)) & set(kept)
    with pytest.raises(DeploymentError):
        free_ports(26, kept)


def test_what_is_behind_the_door_gets_none_of_the_deployments_ports() -> None:
    demo, public = load_deployment(DEMO), free_ports(5)
    names = ("http_port", "grpc_port", "metrics_port", "status_port")
    server = demo.server.model_copy(update=dict(zip(names, public[:4], strict=True)))
    gateway = demo.gateway.model_copy(update={"port": public[4]})
    deployment = demo.model_copy(update={"server": server, "gateway": gateway})
    for _ in range(8):  # which look at each port of this process
        inner = behind_the_door(deployment)
        ports = {inner.server.http_port, inner.server.grpc_port, inner.server.metrics_port, inner.gateway.port}
        assert not ports & set(public)


def test_another_process_looks_elsewhere() -> None:
    code = "import os; from inflight.serve.server import free_ports; print(os.getpid(), *free_ports(20))"
    pid, *theirs = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    ours = {port for _ in range(10) for port in free_ports(3)}  # few at once: servers of other tests may have some
    assert pid % 700 == os.getpid() % 700 or not set(theirs) & ours


def test_too_many_are_refused() -> None:
    with pytest.raises(DeploymentError, match="fewer than 31 of the ports"):
        free_ports(31)
