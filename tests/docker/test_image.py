"""The image of the profile ``cpu`` builds, beside the other tests: those of ``test_compose`` find its layers ready."""

from __future__ import annotations

import pytest

from inflight.engine.native.bindings import ABI
from tests.docker.support.docker_engine import compose, has_engine, run

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.xdist_group("docker"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine here"),
]


def test_the_image_builds() -> None:
    compose("build")
    assert run("docker", "image", "inspect", "--format", "{{.Config.User}}", "inflight:cpu").strip() == "inflight"


def test_the_image_has_the_native_step() -> None:
    """Though it has no compiler."""
    program = "from inflight.engine.native.bindings import load_library; print(load_library().inflight_abi())"
    container = ["docker", "run", "--rm", "--entrypoint", "sh", "inflight:cpu", "-c"]
    assert run(*container, f"! command -v g++ && python3 -c '{program}'").split() == [str(ABI)]
