"""Finds a Triton server: an installed one (NVIDIA's images have it), else the one inside the ``nvidia-pytriton`` wheel.

A server needs a directory of backends. It is assembled at start: the Python backend's library, the stub of
this Python version, and Inflight's own backends beside them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import inflight
from inflight.addresses import without_proxy_for_loopback
from inflight.contract import TENSORRTLLM
from inflight.errors import DeploymentError
from inflight.manifest import TENSORRT_LLM_IMAGE
from inflight.resources import BACKENDS, how_to_install

DEFAULT_INSTALLATION = Path("/opt/tritonserver")
PYTHON_LIBRARY = "libtriton_python.so"
"""The Python backend, in its directory."""
_ARENAS = "4"
"""The most arenas of glibc's heap in the server and in each stage. By default glibc makes eight for each core, and each
keeps what large bodies have filled: over 15,000 hostile requests 18 arenas grew to 760 MiB, and four to 440."""


@dataclass(frozen=True)
class TritonInstallation:
    """Where the server's binary and its parts are."""

    binary: Path
    python_backend: Path
    """Directory with ``PYTHON_LIBRARY``."""
    stub: Path
    """The Python stub for this interpreter's version."""
    loader_path: tuple[Path, ...]
    """The directories with which ``LD_LIBRARY_PATH`` must begin."""
    libpython: Path | None = None
    """The shared libpython that the stub must load, where it is among the system's libraries. It is linked alone: its
    directory in front would hide what ``LD_LIBRARY_PATH`` names, such as a CUDA for older drivers."""
    embedded: bool = False
    """Whether this is the server of the wheel."""

    def assemble_backends(self, directory: Path) -> Path:
        """Fill ``directory`` with the Python backend and Inflight's backends, and return it."""
        _link_backend(directory / "python", [self.stub, *self.python_backend.iterdir()])
        for backend in BACKENDS.iterdir():
            if (backend / "model.py").is_file():
                (directory / backend.name).symlink_to(backend)
        libraries_beside(directory).mkdir()
        if self.libpython is not None:
            (libraries_beside(directory) / self.libpython.name).symlink_to(self.libpython)
        return directory

    def add_upstreams_backend(self, directory: Path) -> None:
        """Add upstream's C++ backend, which NVIDIA's image has beside the Python one.

        Raises:
            DeploymentError: it is not installed.
        """
        backend = self.python_backend.with_name(TENSORRTLLM)
        if not backend.is_dir():
            raise DeploymentError(
                f"this Triton has no backend {TENSORRTLLM} ({backend}); the image {TENSORRT_LLM_IMAGE} has it"
            )
        _link_backend(directory / backend.name, list(backend.iterdir()))

    def environment(self, backends: Path) -> dict[str, str]:
        """Return the environment in which the server and its stubs find this interpreter and its packages.

        A user's own ``MALLOC_ARENA_MAX`` stays.

        Args:
            backends: what ``assemble_backends`` has filled.
        """
        paths = [str(path) for path in (libraries_beside(backends), *self.loader_path)]
        inherited = os.environ.get("LD_LIBRARY_PATH")
        return (
            {"MALLOC_ARENA_MAX": _ARENAS}
            | servers_environment()
            | {
                "LD_LIBRARY_PATH": ":".join(paths + ([inherited] if inherited else [])),
                "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
            }
        )


def servers_environment() -> dict[str, str]:
    """Return the environment of the server's processes, all of which import what is installed.

    Triton's stages ignore ``PYTHONPATH``, so it is left out for the others too.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | without_proxy_for_loopback()


def _require_installed() -> None:
    """Require that this process is of the Inflight that is installed, which the server's processes import.

    Raises:
        DeploymentError: it is another one, which ``PYTHONPATH`` or the working directory has brought.
    """
    own = Path(inflight.__path__[0]).resolve().parent
    script = "import importlib.util as u; s = u.find_spec('inflight'); print(s and s.submodule_search_locations[0])"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True)
    found = Path(done.stdout.strip()).resolve().parent
    if done.returncode == 0 and found == own:
        return
    other = f"the one in {found}" if done.stdout.startswith("/") else "none at all"
    raise DeploymentError(
        f"this is the Inflight in {own}, and the server's processes would import {other}: they ignore "
        "PYTHONPATH and the working directory; install this one, or start the installed one"
    )


def libraries_beside(backends: Path) -> Path:
    """Return the directory for single libraries that the loader finds before all others."""
    return backends.with_name("libraries")


def _link_backend(target: Path, files: list[Path]) -> None:
    target.mkdir(parents=True)
    for file in files:
        if file.suffix == ".so":
            shutil.copy2(file, target)  # the server refuses a library that links out of its backend's directory
        elif not (target / file.name).exists():
            (target / file.name).symlink_to(file)


def find_installation(path: Path | None = None) -> TritonInstallation:
    """Return the installation at ``path``, else at ``/opt/tritonserver``, else the wheel's.

    Raises:
        DeploymentError: nothing found, or it lacks a part, or lies where its Python cannot be used; in one line.
    """
    for place in (sys.prefix, str(BACKENDS)):
        if not place.isascii():
            raise DeploymentError(
                f"Inflight is installed in {place}, and the Python in Triton's stages imports from no directory whose "
                "path is not ASCII; install it elsewhere"
            )
    _require_installed()
    if path is not None or (DEFAULT_INSTALLATION / "bin/tritonserver").is_file():
        return _installed(path or DEFAULT_INSTALLATION)
    return _from_wheel()


def require_engine(kind: str) -> None:
    """Look for what an engine of this ``kind`` computes with, which a stage would look for in vain.

    Raises:
        DeploymentError: it is missing; one line that says how to install it.
    """
    if kind == "pytorch" and importlib.util.find_spec("torch") is None:
        raise DeploymentError(f"the portable engine needs PyTorch: `{how_to_install('engine')}`")


def _installed(root: Path) -> TritonInstallation:
    binary, python = root / "bin/tritonserver", root / "backends/python"
    stub = python / "triton_python_backend_stub"
    for part in (binary, python / PYTHON_LIBRARY, stub):
        if not part.is_file():
            raise DeploymentError(f"{root} is not a Triton installation with the Python backend: {part} is missing")
    own, system = _libpython()
    return TritonInstallation(binary, python, stub, (root / "lib", *own), system)


def _from_wheel() -> TritonInstallation:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        if (machine := platform.machine()) != "x86_64":
            raise DeploymentError(f"there is no Triton server to install on {machine}; name one with --triton")
        install = how_to_install("engine", "serve")
        raise DeploymentError(f"there is no Triton server: `{install}`, or name one with --triton")
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = server / f"python_backend_stubs/{version}/triton_python_backend_stub"
    if not stub.is_file():
        raise DeploymentError(f"the embedded Triton has no stub for Python {version}; use Python 3.11 or 3.12")
    own, system = _libpython()
    if not own and system is None:
        name = f"libpython{version}"
        raise DeploymentError(f"{name}.so.1.0 is missing; install it with: apt-get install {name}")
    libraries = (*own, package.parent / "nvidia_pytriton.libs")
    binary, python = server / "bin/tritonserver", server / "backends/python"
    return TritonInstallation(binary, python, stub, libraries, system, embedded=True)


def _libpython() -> tuple[tuple[Path, ...], Path | None]:
    """Return where the shared libpython is of the Python that this environment was made from.

    The stub would otherwise load whichever libpython the loader finds first, whose standard library is another one;
    where there is none, the stub does not start, and the server waits for it in vain.

    Returns:
        The directory of a Python with libraries of its own, or nothing; and the library among the system's, or None.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    own = Path(sys.base_prefix) / "lib"
    if (own / name).is_file():
        return (own,), None
    multiarch = Path("/usr/lib") / (sysconfig.get_config_var("MULTIARCH") or "")
    found = [place / name for place in (multiarch, Path("/usr/lib64")) if (place / name).is_file()]
    return (), found[0] if found else None
