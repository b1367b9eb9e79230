"""The Docker engine that container tests need, and Docker Compose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]


def compose_command() -> list[str]:
    """Return Docker Compose 2, else 1, else nothing; both take the same words."""
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def has_engine() -> bool:
    """Return whether containers can be run here, with Docker Compose."""
    if not compose_command():
        return False
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def run(*command: str, check: bool = True, **environment: str) -> str:
    """Return what a command says, run at the repository's root; with ``check`` it must succeed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def compose(*arguments: str) -> str:
    """Return what Docker Compose says of the profile ``cpu``."""
    return run(*compose_command(), "--profile", "cpu", *arguments)


def state(container: str) -> dict[str, object]:
    """Return what the engine says of a container's state."""
    found: dict[str, object] = json.loads(run("docker", "inspect", "--format", "{{json .State}}", container))
    return found


def wait_healthy(container: str, limit_s: float) -> None:
    """Return when the container's health check passes."""
    deadline = time.monotonic() + limit_s
    while '"Status": "healthy"' not in json.dumps(state(container)):
        assert time.monotonic() < deadline, run("docker", "logs", container)
        time.sleep(1)
