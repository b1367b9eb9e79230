"""The image of the profile ``cpu`` builds, beside the other tests: those of ``test_compose`` find its layers ready."""

from __future__ import annotations

import pytest

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
