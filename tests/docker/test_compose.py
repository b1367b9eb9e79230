"""`docker compose --profile cpu up` on a real Docker engine: built, healthy, answers, goes down clean.

Needs a Docker engine, named by DOCKER_HOST if it is not the default one. BASE_IMAGE, BUILD_NETWORK, PIP_FIND_LINKS and
EXTRA_CA_BUNDLE are passed on to the build, for machines that reach the public registries by other ways.
"""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.docker.support.docker_engine import ROOT, compose, compose_command, has_engine, run, state, wait_healthy

COMMAND = re.compile(r"\bdocker[ -]compose (--profile cpu up)\b")


pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine here"),
]


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    said = COMMAND.search((ROOT / "README.md").read_text())
    assert said
    compose("build")
    run(*compose_command(), *said[1].split(), "-d")
    try:
        yield compose("ps", "-q").strip().splitlines()[-1]
    finally:
        compose("down", "--volumes")


def test_it_becomes_healthy_and_answers(container: str) -> None:
    wait_healthy(container, 300)
    body = {"text_input": "What is in-flight batching?", "max_tokens": 32}
    reply = httpx.post("http://127.0.0.1:8000/v2/models/ensemble/generate", json=body, timeout=30)
    assert "batch" in reply.json()["text_output"]
    models = httpx.get("http://127.0.0.1:8080/v1/models", timeout=60).json()
    assert [model["id"] for model in models["data"]] == ["demo"]
    assert "nv_trt_llm_request_metrics" in httpx.get("http://127.0.0.1:8002/metrics").text


def test_it_runs_without_privileges(container: str) -> None:
    assert re.search(r"uid=10001\(inflight\)", run("docker", "exec", container, "id"))
    failed = run("docker", "exec", container, "touch", "/opt/inflight/x", check=False)
    assert "Read-only file system" in failed or "Permission denied" in failed
    assert "writable" in run("docker", "exec", container, "sh", "-c", "touch ~/x && echo writable")
    assert re.search(r"CapEff:\s+0{16}", run("docker", "exec", container, "grep", "CapEff", "/proc/self/status"))


def test_the_profile_load_measures_it(container: str) -> None:
    wait_healthy(container, 300)
    load = (*compose_command(), "--profile", "load")
    settings = {"USERS": "2", "RUN_TIME": "5s", "SCENARIO": "smoke"}
    run(*load, "build", "load")
    run(*load, "run", "--rm", "load", **settings)
    lines = run(*load, "run", "--rm", "--entrypoint", "cat", "load", "/results/load_stats.csv").splitlines()
    [total] = [row for row in csv.DictReader(lines) if row["Name"] == "Aggregated"]
    assert int(total["Request Count"]) > 0 == int(total["Failure Count"])


def test_it_stops_quickly_and_leaves_nothing(container: str) -> None:
    with httpx.Client() as client:
        client.get("http://127.0.0.1:8000/v2/health/ready")  # an idle connection stays open
        time.sleep(2)
        started = time.monotonic()
        compose("stop")
        assert time.monotonic() - started < 30, "it waited for its exit timeout"
    assert state(container)["ExitCode"] == 0
    compose("down", "--volumes")
    assert container not in run("docker", "ps", "-aq", "--no-trunc")
