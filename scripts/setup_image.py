"""Installs Inflight into the Python environment that runs this, and replaces none of the packages that are there.

    python3 scripts/setup_image.py

It is for NVIDIA's TensorRT-LLM image, whose packages fit each other and nothing else. What is missing comes at the
versions that Inflight is tested with. PIP_FLAGS in the environment has more options of pip.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTED = ROOT / "constraints.txt"
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?")


def main() -> None:
    """Install what is missing, then Inflight itself."""
    frozen = _output(*_PIP, "list", "--format=freeze")
    there = {_name(line) for line in frozen.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["engine"], *extras["door"]]
    missing = [_without_version(one) for one in needed if _name(one) not in there]
    if missing and not _install_what_fits(missing, frozen, there):
        # Such as gRPC's client beside a newer protobuf than it allows, with which it works.
        print(
            "some of that does not allow the versions that are there; it is installed beside them as it is", flush=True
        )
        _require(_install("--no-deps", *_closure(missing, there)))
    _require(_install("--no-deps", "--editable", str(ROOT)))


def _install_what_fits(missing: list[str], frozen: str, there: set[str]) -> bool:
    """Return whether pip could install ``missing`` at the tested versions, and all that is there is allowed."""
    tested = [line for line in TESTED.read_text().splitlines() if line and line[0] != "#" and _name(line) not in there]
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join([frozen, *tested]))
        return _install("--constraint", str(constraints), *missing)


def _closure(missing: list[str], there: set[str]) -> list[str]:
    """Return ``missing`` and what that needs, as ``name==version``, without what is there."""
    resolve = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", "--constraint", str(TESTED)]
    report = json.loads(_output(*_PIP, *resolve, *_flags(), *missing))
    found = [(one["metadata"]["name"], one["metadata"]["version"]) for one in report["install"]]
    return [f"{name}=={version}" for name, version in found if _name(name) not in there]


def _name(requirement: str) -> str:
    """Return the package's name as all spell it: ``Typing_Extensions==4`` is ``typing-extensions``."""
    return re.sub(r"[-_.]+", "-", _without_version(requirement).partition("[")[0]).lower()


def _without_version(requirement: str) -> str:
    """Return the package's name and extras: ``tritonclient[grpc]==2`` is ``tritonclient[grpc]``."""
    found = _REQUIREMENT.match(requirement)
    assert found, requirement
    return found[0]


def _flags() -> list[str]:
    return shlex.split(os.environ.get("PIP_FLAGS", ""))


def _install(*arguments: str) -> bool:
    return subprocess.run([*_PIP, "install", *_flags(), *arguments]).returncode == 0


def _output(*command: str) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    _require(done.returncode == 0)
    return done.stdout


def _require(good: bool) -> None:
    if not good:
        sys.exit("Inflight is not installed: pip says above why")


if __name__ == "__main__":
    os.umask(0o022)
    main()
