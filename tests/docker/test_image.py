"""The image of the profile ``cpu`` builds, and has what it needs and no more; the other tests find its layers ready."""

from __future__ import annotations

import json
import re

import pytest

from inflight.engine.native.bindings import ABI
from tests.docker.support.docker_engine import compose, has_engine, run

pytestmark = [
    pytest.mark.proof(waits=True),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not has_engine(), reason="no Docker engine here"),
]

MOST_BYTES = 1_200_000_000
IMPORTS_EVERYTHING = """
import importlib, pkgutil, inflight
absent = {"triton", "triton_python_backend_utils", "matplotlib", "transformers", "modelopt", "scipy", "pynvml"}
for module in pkgutil.walk_packages(inflight.__path__, "inflight."):
    if module.name.endswith(("__main__", "libinflight_step")):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name in absent, (module.name, error.name)
"""
LISTS_PACKAGES = """
from importlib.metadata import distributions
for one in distributions():
    print(one.metadata["Name"] + " " + one.version)
"""


@pytest.fixture(scope="module")
def image() -> str:
    compose("build")
    return "inflight:cpu"


def _shell(image: str, command: str, user: str = "root") -> str:
    return run("docker", "run", "--rm", "--user", user, "--network", "none", "--entrypoint", "sh", image, "-c", command)


def test_it_is_small_and_runs_as_an_ordinary_user(image: str) -> None:
    about = json.loads(run("docker", "image", "inspect", image))[0]
    assert about["Config"]["User"] == "inflight"
    assert about["Size"] < MOST_BYTES


def test_it_has_the_native_step_and_nothing_that_builds(image: str) -> None:
    program = "from inflight.engine.native.bindings import load_library; print(load_library().inflight_abi())"
    assert _shell(image, f"python3 -c '{program}'").split() == [str(ABI)]
    tools = "gcc g++ cc c++ clang ld as make cmake pip pip3 protoc git curl wget"
    assert _shell(image, f"for tool in {tools}; do command -v $tool; done; true").split() == []
    found = _shell(image, "find / -xdev \\( -name '*.h' -o -name '*.hpp' -o -name '*.a' -o -name 'pip' \\) -print")
    assert found.split() == []


def test_every_module_finds_what_it_imports(image: str) -> None:
    """Though tests, headers and more are removed from the packages."""
    run("docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", image, "-c", IMPORTS_EVERYTHING)


def test_the_bill_of_materials_lists_every_package(image: str) -> None:
    document = json.loads(_shell(image, "cat /opt/inflight/sbom.cdx.json"))
    assert document["bomFormat"] == "CycloneDX"
    components = document["components"]
    listed = [(one.get("purl", "").startswith("pkg:deb/"), f"{one['name']} {one['version']}") for one in components]
    assert len(listed) == len(set(listed))
    debian = _shell(image, "dpkg-query --show --showformat '${Package} ${Version}\\n'").splitlines()
    python = run("docker", "run", "--rm", "--entrypoint", "python3", image, "-c", LISTS_PACKAGES).splitlines()
    assert {line for of_debian, line in listed if of_debian} == set(debian)
    assert {_normal(line) for of_debian, line in listed if not of_debian} == {_normal(line) for line in python}


def _normal(line: str) -> str:
    name, version = line.split()
    return re.sub(r"[-_.]+", "-", name).lower() + f" {version}"
