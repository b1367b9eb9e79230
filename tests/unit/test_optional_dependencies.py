"""What runs with the extras that serving needs, and how a command says that it needs another."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from inflight.report.failures import EXTRAS
from inflight.resources import DEMO

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REFUSING = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

refused = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Refuse())
"""
RUN = REFUSING + "sys.argv[:2] = ['inflight']\nfrom inflight.cli import app\napp()"


def _needed(requirements: Iterable[str], extra: str = "") -> Iterator[tuple[str, str]]:
    """Yield (distribution, extra) of what ``requirements`` install, not looking further."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(requirement.name), one) for one in ("", *requirement.extras))


def _installed_by(requirements: Iterable[str]) -> set[str]:
    """Return the names of all distributions that ``requirements`` install here, theirs included."""
    found: set[tuple[str, str]] = set()
    waiting = list(_needed(requirements))
    while waiting:
        name, extra = one = waiting.pop()
        if one in found:
            continue
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform
            continue
        found.add(one)
        waiting += _needed(required, extra)
    return {name for name, _ in found}


def _beyond(*extras: str) -> set[str]:
    """Return the top-level modules installed here that the base and ``extras`` do not install."""
    optional = [one for extra in extras for one in PROJECT["optional-dependencies"][extra]]
    kept = _installed_by([*PROJECT["dependencies"], *optional]) | {PROJECT["name"]}
    return {
        module
        for module, names in packages_distributions().items()
        if not kept & {canonicalize_name(name) for name in names}
    }


@pytest.fixture(scope="module")
def refused() -> str:
    """Every module that `make serve` and the container image do without, comma-separated."""
    return ",".join(sorted(_beyond("engine", "serve")))


def test_what_serving_does_without_is_known(refused: str) -> None:
    lacking = set(refused.split(","))
    assert {"locust", "transformers", "modelopt", "pytest", "hypothesis", "grafana_foundation_sdk"} <= lacking
    assert not lacking & {"inflight", "torch", "numpy", "matplotlib", "grpc", "google", "sympy", "typer", "click"}
    assert not lacking & {"pytriton"}


@pytest.mark.proof
@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"]], ids=" ".join)
def test_serving_has_all_that_the_command_imports(words: list[str], refused: str) -> None:
    done = subprocess.run([sys.executable, "-c", RUN, refused, *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: inflight" in done.stdout


GRPC = "grpc,tritonclient,google"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "Usage: inflight"),
        (["serve", "--triton", "nowhere"], "inflight: nowhere is not a Triton installation"),
        (["generate", "--url", "localhost:1", "hi"], "inflight: gRPC needs the package tritonclient[grpc]"),
        (["chat", "--url", "localhost:1"], "inflight: gRPC needs the package tritonclient[grpc]"),
        (["top", "--once", "--url", "localhost:1"], "inflight: gRPC needs the package tritonclient[grpc]"),
        (["generate", "--url", "http://localhost:1", "hi"], "inflight: no server answers at localhost:1"),
    ],
)
def test_all_but_calls_over_grpc_does_without_grpc(words: list[str], said: str, refused: str) -> None:
    command = [sys.executable, "-c", RUN, f"{refused},{GRPC}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_is_looked_at_without_grpc(refused: str) -> None:
    """A server is looked for in the other protocol too: what cannot be spoken here is not found, and not told of."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threading.Thread(target=_hang_up, args=(listening,), daemon=True).start()
        command = [sys.executable, "-c", RUN, f"{refused},{GRPC}", "generate", "--url", url, "hi"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(r"inflight: .* is not a Triton server; .*\n", done.stderr)


def _hang_up(listening: socket.socket) -> None:
    """Speak no protocol."""
    with suppress(OSError):
        while True:
            listening.accept()[0].close()


@pytest.mark.proof
def test_a_command_that_needs_more_says_how_to_install_it(refused: str, tmp_path: Path) -> None:
    words = ["build", "--model", str(DEMO / "model"), "--precision", "fp8", "--output", str(tmp_path / "built")]
    command = [sys.executable, "-c", RUN, refused, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith("inflight: transformers is not installed; it comes with: make setup EXTRAS=build\n")


@pytest.mark.sweep
@pytest.mark.parametrize(("module", "extra"), EXTRAS.items())
def test_the_extra_that_is_named_brings_the_module(module: str, extra: str) -> None:
    names = {canonicalize_name(name) for name in packages_distributions()[module]}
    assert names & _installed_by(PROJECT["optional-dependencies"][extra])
