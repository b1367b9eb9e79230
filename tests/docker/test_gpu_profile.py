"""`docker compose --profile gpu up` in an image that looks like NVIDIA's: every engine healthy, answering, down clean.

The look-alike (``tests/docker/lookalike``) is built on Ubuntu 24.04, which UBUNTU_IMAGE names where the engine cannot
fetch it. It is large, as its PyTorch is the CUDA one unless an index says otherwise. No GPU is needed: the reservation
is left out. LOOKALIKE_IMAGE names one that was built before. What else is taken from the environment is said in
``test_compose``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from inflight.client import Client, HttpClient
from inflight.resources import DEMO
from tests.docker.support.docker_engine import ROOT, compose_command, has_engine, run, wait_healthy
from tests.triton.support.upstream_backend import write_engine

UBUNTU = os.environ.get("UBUNTU_IMAGE", "ubuntu:24.04")
LOOKALIKE = "inflight-lookalike"
ADDRESS = "127.0.0.2"
"""Where the container's ports are published; others may serve on 127.0.0.1."""
BUILD_ARGUMENTS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "EXTRA_CA_BUNDLE")
MODEL = "/opt/inflight/deployments/demo/model"
PYTHON = "/opt/venv-tritonserver/bin"
LOADS_WHAT_IT_COMPILED = """
import ctypes, os, pathlib, subprocess
for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "HF_HOME", "NUMBA_CACHE_DIR"):
    folder = pathlib.Path(os.environ[name])
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "made.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "-o", library, "-"], input=b"int made(void) { return 7; }", check=True)
    assert ctypes.CDLL(str(library)).made() == 7
"""


def _has_ubuntu() -> bool:
    if not has_engine():
        return False
    known = subprocess.run(["docker", "image", "inspect", UBUNTU], capture_output=True).returncode == 0
    return known or subprocess.run(["docker", "pull", "--quiet", UBUNTU], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine here"),
]


@pytest.fixture(scope="module")
def lookalike(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image that looks like NVIDIA's."""
    if ready := os.environ.get("LOOKALIKE_IMAGE"):
        return ready
    if not _has_ubuntu():
        pytest.skip(f"no image {UBUNTU} to build on; UBUNTU_IMAGE names another")
    context = tmp_path_factory.mktemp("lookalike")
    shutil.copytree(ROOT / "tests/docker/lookalike", context, dirs_exist_ok=True)
    for folder in ("fakes", "facts"):
        shutil.copytree(ROOT / "tests" / folder, context / folder, ignore=shutil.ignore_patterns("__pycache__"))
    if bundle := os.environ.get("EXTRA_CA_BUNDLE"):
        shutil.copy(ROOT / bundle, context)
    passed = [f"--build-arg={name}={os.environ[name]}" for name in BUILD_ARGUMENTS if name in os.environ]
    network = f"--network={os.environ.get('BUILD_NETWORK', 'default')}"
    run("docker", "build", network, f"--build-arg=UBUNTU_IMAGE={UBUNTU}", *passed, "--tag", LOOKALIKE, str(context))
    return LOOKALIKE


class Profile:
    """The compose file's profile ``gpu``, without what this machine cannot give."""

    def __init__(self, folder: Path) -> None:
        self.models = folder / "models"
        self._file = folder / "docker-compose.yml"
        self.models.mkdir()

    def compose(self, *arguments: str) -> str:
        """Return what Docker Compose says."""
        return run(*compose_command(), "-p", "inflight-lookalike", "-f", str(self._file), *arguments)

    def up(self, name: str) -> str:
        """Serve a deployment; return the container's id, once it is healthy."""
        environment = {"DEPLOYMENT": f"/models/{name}", "MODELS": str(self.models), "BIND": ADDRESS}
        config = yaml.safe_load(run(*compose_command(), "--profile", "gpu", "config", **environment))
        gpu = config["services"]["gpu"]
        del gpu["deploy"], gpu["build"], gpu["profiles"]
        if subprocess.run(["prlimit", "--memlock=unlimited", "true"], capture_output=True).returncode:
            del gpu["ulimits"]["memlock"]  # a Docker engine of this user may not raise the limit either
        names = {"networks": {"default": None}, "volumes": {"caches": None, "engines": None}}
        self._file.write_text(yaml.safe_dump({"services": {"gpu": gpu}} | names))
        self.compose("up", "-d")
        container = self.compose("ps", "-q").strip().splitlines()[-1]
        wait_healthy(container, 300)
        return container


@pytest.fixture(scope="module")
def profile(lookalike: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profile]:
    """Build the image of the profile on the look-alike; bring down what runs at the end, and see that all is gone."""
    run(*compose_command(), "--profile", "gpu", "build", "gpu", GPU_BASE_IMAGE=lookalike)
    made = Profile(tmp_path_factory.mktemp("profile"))
    for kind in ("trtllm", "tensorrtllm", "pytorch"):
        _write(made.models / kind, kind)
    run("chmod", "-R", "a+rX", str(made.models))
    yield made
    made.compose("down", "--volumes")
    assert "inflight-lookalike" not in run("docker", "ps", "--all") + run("docker", "volume", "ls")


def _write(directory: Path, kind: str) -> None:
    """Write a deployment of the demo model on an engine."""
    if kind == "tensorrtllm":
        write_engine(directory / "engine")
        data = {"engine": {"kind": kind}, "tensorrt_llm": {"engine_dir": "engine"}}
    else:
        directory.mkdir()
        data = yaml.safe_load((DEMO / "deployment.yaml").read_text())
        data["engine"] |= {"kind": kind}
    (directory / "deployment.yaml").write_text(yaml.safe_dump(data | {"model": MODEL}))


def _packages(image: str) -> set[str]:
    listed = run("docker", "run", "--rm", "--entrypoint", f"{PYTHON}/pip", image, "list", "--format=freeze")
    return set(re.findall(r"^\S+==\S+$", listed, re.MULTILINE))


def test_the_images_packages_stay_as_they_are(profile: Profile, lookalike: str) -> None:
    before, after = _packages(lookalike), _packages("inflight:gpu")
    assert before <= after
    added = {one.partition("==")[0] for one in after - before}
    assert {"inflight", "tritonclient", "typer", "opentelemetry-sdk"} <= added
    assert not {"numpy", "torch", "transformers", "httpx", "pydantic"} & added


@pytest.mark.parametrize("kind", ["trtllm", "tensorrtllm", "pytorch"])
def test_each_engine_becomes_healthy_and_answers(profile: Profile, kind: str) -> None:
    container = profile.up(kind)
    with HttpClient(f"http://{ADDRESS}:8000") as client:
        assert "batch" in client.generate("What is in-flight batching?").text
    with Client(f"{ADDRESS}:8001") as client, client.stream("What is in-flight batching?", request_id="1") as stream:
        assert "batch" in "".join(chunk.text for chunk in stream)
    # The container's own clients, over gRPC too.
    said = run("docker", "exec", container, "inflight", "generate", "--url", "localhost:8001", "What is batching?")
    assert "batch" in said
    serving = run("docker", "exec", container, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert f"{PYTHON}/python3 {PYTHON}/inflight serve" in serving
    assert "/opt/tritonserver/bin/tritonserver --model-repository" in serving
    stages = "cat $(grep --files-with-matches python_backend_stu[b] /proc/[0-9]*/cmdline | sed s/cmdline/environ/)"
    environments = run("docker", "exec", container, "sh", "-c", f"{stages} | tr '\\0' '\\n'")
    assert set(re.findall(r"^PATH=([^:\n]*)", environments, re.MULTILINE)) == {PYTHON}  # MPI starts `python3`


def test_caches_outlive_a_container_and_all_else_is_read_only(profile: Profile) -> None:
    first = profile.up("pytorch")
    run("docker", "exec", first, "python3", "-c", LOADS_WHAT_IT_COMPILED)
    for place in ("/opt/inflight", f"{PYTHON}/../lib", "/opt/tritonserver"):
        assert "Read-only" in run("docker", "exec", first, "touch", f"{place}/x", check=False)
    second = profile.up("trtllm")
    assert second != first
    assert "made.so" in run("docker", "exec", second, "sh", "-c", "ls $TRITON_CACHE_DIR")


def test_another_user_has_writable_caches_on_a_read_only_file_system(profile: Profile) -> None:
    image = ("--entrypoint", "python3", "inflight:gpu", "-c", LOADS_WHAT_IT_COMPILED)
    run("docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--user", "12345", *image)


def test_memory_and_limits_are_those_that_tensorrt_llm_asks_for(profile: Profile) -> None:
    container = profile.up("trtllm")
    limits = run("docker", "exec", container, "cat", "/proc/1/limits")
    assert re.search(r"Max stack size +67108864 +(unlimited|9223372036854775807)", limits)
    assert " 8.0G " in run("docker", "exec", container, "df", "-h", "/dev/shm")
    assert re.search(r"uid=10001\(inflight\)", run("docker", "exec", container, "id"))


def test_a_container_that_was_killed_leaves_no_shared_memory(profile: Profile) -> None:
    container = profile.up("pytorch")
    run("docker", "exec", container, "touch", "/dev/shm/left")
    run("docker", "kill", "--signal", "KILL", container)
    run("docker", "start", container)
    wait_healthy(container, 300)
    assert "left" not in run("docker", "exec", container, "ls", "/dev/shm")


def test_the_profile_reserves_every_gpu_and_gives_a_start_an_hour(profile: Profile) -> None:
    config = yaml.safe_load(run(*compose_command(), "--profile", "gpu", "config"))["services"]["gpu"]
    [devices] = config["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
    assert devices["count"] in ("all", -1)
    assert config["ulimits"]["memlock"] in (-1, {"hard": -1, "soft": -1})
    check = run("docker", "inspect", "--format", "{{.Config.Healthcheck.StartPeriod}}", "inflight:gpu")
    assert check.strip() in ("1h0m0s", str(3600 * 10**9))
