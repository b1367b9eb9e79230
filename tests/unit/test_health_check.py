"""The health check of the images asks what `inflight serve` says of itself, on a port that needs no certificate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.serve.server import free_ports
from inflight.serve.status import State, Status
from inflight.serve.status_server import StatusServer

DOCKERFILE = (Path(__file__).parents[2] / "Dockerfile").read_text()
CHECKS = [json.loads(words) for words in re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)]
COMMANDS = [json.loads(words) for words in re.findall(r'^ENTRYPOINT (\["inflight".*\])$', DOCKERFILE, re.MULTILINE)]


def _port(command: list[str]) -> str:
    return command[command.index("--status-port") + 1]


def test_both_images_serve_it_on_a_port_that_is_not_published() -> None:
    assert len(CHECKS) == len(COMMANDS) == 2
    exposed = {port for ports in re.findall("^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE) for port in ports.split()}
    for check, command in zip(CHECKS, COMMANDS, strict=True):
        assert f"http://127.0.0.1:{_port(command)}/" in check[-1]
        assert _port(command) not in exposed


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_it_passes_once_the_server_is_ready(number: int) -> None:
    (port,) = free_ports(1)
    status = Status()
    server = StatusServer("0.0.0.0", port, status, None)
    program = CHECKS[number][-1].replace(f":{_port(COMMANDS[number])}/", f":{port}/")
    server.start()
    try:
        codes = []
        for state in (State.STARTING, State.READY):
            status.change(state)
            codes.append(subprocess.run([sys.executable, "-c", program], capture_output=True).returncode)
        assert codes == [1, 0]
    finally:
        server.stop()
