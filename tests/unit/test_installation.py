"""Where an installed Triton's server looks for libraries, and for Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from inflight.serve.installation import find_installation, servers_environment

ROOT = Path(__file__).parents[2]
LIBPYTHON = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"


@pytest.fixture
def triton(tmp_path: Path) -> Path:
    """Return the files of an installed Triton, without content."""
    for part in (
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_stub",
    ):
        (tmp_path / "triton" / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "triton" / part).touch()
    (tmp_path / "runtime").mkdir()
    return tmp_path / "triton"


def _paths(triton: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return where the loader looks in a server whose environment names a library for an older driver."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat/lib")
    installation = find_installation(triton)
    backends = installation.assemble_backends(triton.parent / "runtime/backends")
    environment = installation.environment(backends)
    assert environment["PATH"].split(":")[0] == str(Path(sys.executable).parent)  # MPI starts `python3` of it
    return [Path(path) for path in environment["LD_LIBRARY_PATH"].split(":")]


def test_the_systems_libpython_is_found_without_the_systems_other_libraries(
    triton: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would come before those that LD_LIBRARY_PATH names: NVIDIA's driver is among them."""
    system = tmp_path / "system"
    system.mkdir()
    for name in (LIBPYTHON, "libcuda.so.1"):
        (system / name).touch()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "usr"))
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(system))
    paths = _paths(triton, monkeypatch)
    assert [(path / LIBPYTHON).exists() for path in paths] == [True, False, False]
    assert not any((path / "libcuda.so.1").exists() for path in paths)
    assert paths[1:] == [triton / "lib", Path("/usr/local/cuda/compat/lib")]


def test_a_python_with_libraries_of_its_own_brings_them(
    triton: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "conda/lib"
    own.mkdir(parents=True)
    (own / LIBPYTHON).touch()
    monkeypatch.setattr(sys, "base_prefix", str(own.parent))
    first, *paths = _paths(triton, monkeypatch)
    assert not list(first.iterdir()), "what is there comes before the installation's own"
    assert paths == [triton / "lib", own, Path("/usr/local/cuda/compat/lib")]


def test_the_servers_processes_import_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "PYTHONPATH" not in servers_environment()
    assert "PYTHONPATH" not in find_installation().environment(tmp_path / "backends")


def test_another_inflight_than_the_installed_one_serves_nothing(tmp_path: Path) -> None:
    """Its own processes would be of one version, and Triton's stages of the other."""
    other = Path(shutil.copytree(ROOT / "inflight", tmp_path / "other/inflight")).parent
    for name in ("backends", "model_repository", "deployments"):
        (other / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "inflight", "serve"]
    environment = os.environ | {"PYTHONPATH": str(other)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    said = " ".join(done.stderr.split())
    assert (
        f"inflight: this is the Inflight in {other}, and the server's processes would import the one in {ROOT}" in said
    )
    assert "install this one, or start the installed one" in said
    assert "Traceback" not in said


def test_the_servers_heap_has_few_arenas_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = find_installation()
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert installation.environment(Path("backends"))["MALLOC_ARENA_MAX"] == "4"
    monkeypatch.setenv("MALLOC_ARENA_MAX", "64")
    assert installation.environment(Path("backends"))["MALLOC_ARENA_MAX"] == "64"
