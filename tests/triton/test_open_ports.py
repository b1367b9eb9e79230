"""SECURITY.md's table of ports, walked on a real server: what answers without a key, and what listens at all."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from inflight.serve.envoy.paths import GATEWAY_READS, OPEN_PATHS, STATUS_PATHS
from inflight.serve.server import free_ports
from tests.support.waiting import wait_until
from tests.triton.support.servers import on_engine

pytestmark = pytest.mark.proof
PAGE = (Path(__file__).parents[2] / "SECURITY.md").read_text()
HOST = "127.0.0.2"
"""Another address of this machine than what is behind the door has."""
PORTS = ("http_port", "grpc_port", "metrics_port", "gateway_port", "status_port")
ASKED = {*OPEN_PATHS, *STATUS_PATHS, *GATEWAY_READS, "/", "/v2", "/v2/models/stats"}
KEY = "sk-first"


def told(door: str) -> dict[str, set[str]]:
    """Return the paths that answer without a key, by port, as the page says; gRPC has none."""
    rows = re.findall(rf"^\| {door} \| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.MULTILINE)
    return {port: ASKED if "any path" in said else set(re.findall(r"`(/[^`]*)`", said)) for port, said in rows}


def get(port: int, path: str, key: str = "") -> int:
    """Return the status of an answer; 0: there is none of HTTP/1."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def listening(process: int) -> set[tuple[str, int]]:
    root = psutil.Process(process)
    connections = (one for part in (root, *root.children(recursive=True)) for one in part.net_connections("inet"))
    found = (one.laddr for one in connections if one.status == psutil.CONN_LISTEN)
    return {(address.ip.removeprefix("::ffff:"), address.port) for address in found}


@pytest.mark.parametrize("door", ["on", "off"])
def test_no_port_tells_more_without_a_key_than_another_does_with_one(tmp_path: Path, door: str) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    if door == "on":
        pytest.importorskip("envoy", reason="the door is Envoy, of the extra `door`")
        asking = {"door": {"enabled": True, "api_keys_file": "keys"}}
    else:
        asking = {"gateway": {"api_keys_file": "keys"}}
    on_engine("replay", tmp_path, **asking)
    ports, said = dict(zip(PORTS, free_ports(len(PORTS)), strict=True)), tmp_path / "said"
    options = [f"--{name.replace('_', '-')}={port}" for name, port in ports.items()]
    command = [str(Path(sys.executable).with_name("inflight")), "serve", str(tmp_path), "--host", HOST, *options]
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    with said.open("w") as file:
        process = subprocess.Popen(command, stderr=file, start_new_session=True, env=environment)
    try:
        assert wait_until(lambda: "Ctrl-C stops it" in said.read_text() or process.poll() is not None, 180)
        found = listening(process.pid)
        assert {port for host, port in found if host == HOST} == set(ports.values())
        assert {host for host, _ in found} <= {HOST, "127.0.0.1"}
        answering = {name: {path for path in ASKED if get(port, path) == 200} for name, port in ports.items()}
        assert answering == told(door)
        if door == "on":
            assert all(get(ports["metrics_port"], path, KEY) == 200 for path in ("/metrics", "/status"))
    finally:
        process.terminate()
        process.wait()
