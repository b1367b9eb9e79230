"""`docker compose --profile cpu up` on a real Docker engine: built, healthy, answers, goes down clean.

Needs a Docker engine, named by DOCKER_HOST if it is not the default one. BASE_IMAGE, BUILD_NETWORK, PIP_FIND_LINKS and
EXTRA_CA_BUNDLE are passed on to the build, for machines that reach the public registries by other ways.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^docker[ -]compose (--profile cpu up)$", re.MULTILINE)


def _compose_command() -> list[str]:
    """Return Docker Compose 2, else 1, else nothing; both take the same words."""
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


def _has_engine() -> bool:
    if not _compose_command():
        return False
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not _has_engine(), reason="no Docker engine here"),
]


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{command}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _compose(*arguments: str) -> str:
    return _run(*_compose_command(), "--profile", "cpu", *arguments)


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    said = COMMAND.search((ROOT / "README.md").read_text())
    assert said
    _compose("build")
    _run(*_compose_command(), *said[1].split(), "-d")
    try:
        yield _compose("ps", "-q").strip().splitlines()[-1]
    finally:
        _compose("down", "--volumes")


def _state(container: str) -> dict[str, object]:
    state: dict[str, object] = json.loads(_run("docker", "inspect", "--format", "{{json .State}}", container))
    return state


def test_it_becomes_healthy_and_answers(container: str) -> None:
    deadline = time.monotonic() + 90
    while '"Status": "healthy"' not in json.dumps(_state(container)):
        assert time.monotonic() < deadline, _compose("logs")
        time.sleep(1)
    body = {"text_input": "What is in-flight batching?", "max_tokens": 32}
    reply = httpx.post("http://127.0.0.1:8000/v2/models/ensemble/generate", json=body, timeout=30)
    assert "batch" in reply.json()["text_output"]
    assert "nv_trt_llm_request_metrics" in httpx.get("http://127.0.0.1:8002/metrics").text


def test_it_runs_without_privileges(container: str) -> None:
    assert re.search(r"uid=10001\(inflight\)", _run("docker", "exec", container, "id"))
    failed = _run("docker", "exec", container, "touch", "/opt/inflight/x", check=False)
    assert "Read-only file system" in failed or "Permission denied" in failed
    assert re.search(r"CapEff:\s+0{16}", _run("docker", "exec", container, "grep", "CapEff", "/proc/self/status"))


def test_it_stops_quickly_and_leaves_nothing(container: str) -> None:
    with httpx.Client() as client:
        client.get("http://127.0.0.1:8000/v2/health/ready")  # an idle connection stays open
        time.sleep(2)
        started = time.monotonic()
        _compose("stop")
        assert time.monotonic() - started < 15
    assert _state(container)["ExitCode"] == 0
    _compose("down", "--volumes")
    assert container not in _run("docker", "ps", "-aq", "--no-trunc")


def test_the_gpu_profile_reserves_a_gpu() -> None:
    config = _run(*_compose_command(), "--profile", "gpu", "config")
    assert "tritonserver" in config
    assert re.search(r"capabilities:\s+- gpu", config)
