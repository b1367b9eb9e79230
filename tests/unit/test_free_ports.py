"""Ports for servers that start later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.serve.server import free_ports


def test_they_are_distinct_below_those_of_outgoing_connections_and_free() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(9)
    assert len(set(ports)) == 9
    assert all(1024 < port < min(lowest, 32_768) for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert ports[0] not in {port for _ in range(10) for port in free_ports(3)}


def test_another_process_looks_elsewhere() -> None:
    code = "import os; from inflight.serve.server import free_ports; print(os.getpid(), *free_ports(20))"
    pid, *theirs = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    ours = {port for _ in range(10) for port in free_ports(3)}  # few at once: servers of other tests may have some
    assert pid % 700 == os.getpid() % 700 or not set(theirs) & ours


def test_too_many_are_refused() -> None:
    with pytest.raises(DeploymentError, match="fewer than 31 of the ports"):
        free_ports(31)
