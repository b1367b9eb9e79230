"""Ports for servers that start later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from inflight.errors import DeploymentError
from inflight.resources import DEMO
from inflight.serve import server
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
    settings = demo.server.model_copy(update=dict(zip(names, public[:4], strict=True)))
    gateway = demo.gateway.model_copy(update={"port": public[4]})
    deployment = demo.model_copy(update={"server": settings, "gateway": gateway})
    for _ in range(8):  # which look at each port of this process
        inner = behind_the_door(deployment)
        ports = {inner.server.http_port, inner.server.grpc_port, inner.server.metrics_port, inner.gateway.port}
        assert not ports & set(public)


def test_another_process_looks_elsewhere() -> None:
    """Also one whose number leads to the same part."""
    code = (
        f"import os; os.getpid = lambda: {os.getpid()}; from inflight.serve.server import free_ports; "
        "print(*free_ports(9), flush=True); input()"
    )
    ours = {port for _ in range(10) for port in free_ports(3)}  # few at once: servers of other tests may have some
    with ExitStack() as stack:
        for _ in range(2):
            command = [sys.executable, "-c", code]
            other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(other.communicate, "\n")
            assert other.stdout is not None
            theirs = set(map(int, other.stdout.readline().split()))
            assert len(theirs) == 9
            assert not theirs & ours
            ours |= theirs


def test_where_all_parts_are_taken_one_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PARTS", 2)
    with ExitStack() as stack:
        for part in range(2):
            taken = stack.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):  # another process has it
                taken.bind(f"\0inflight-ports-{part}")
        part, holder = server._part_of.__wrapped__(7)
        holder.close()
        assert part == 1


def test_too_many_are_refused() -> None:
    with pytest.raises(DeploymentError, match="fewer than 31 of the ports"):
        free_ports(31)
