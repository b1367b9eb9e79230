"""Which Python runs which stage of a build.

Inflight's own, which runs the build, has ModelOpt and transformers: it plans, quantizes and verifies. TensorRT-LLM,
whose tools compile an engine, is in the same one or in another: NVIDIA's image has it in an environment of its own,
with an older ModelOpt and transformers, so that no one environment has all.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.machine import Machine

ENVIRONMENT_VARIABLE = "INFLIGHT_TENSORRT_LLM_PYTHON"
"""Names TensorRT-LLM's interpreter, where it is not found; so does ``--tensorrt-llm-python``."""
IMAGES = Path("/opt/venv-tritonserver/bin/python3")
"""The interpreter of NVIDIA's image that has TensorRT-LLM."""
_ASK = """
import importlib.metadata, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({"tensorrt_llm": version("tensorrt-llm"), "tensorrt": version("tensorrt")}))
"""
_ASK_S = 60


@dataclass(frozen=True)
class TensorRtLlm:
    """An interpreter that has TensorRT-LLM."""

    python: Path
    tensorrt_llm: str
    """Its version."""
    tensorrt: str | None

    def program(self, name: str) -> str:
        """Return a program of its environment: by its path where it lies beside the interpreter, else by its name."""
        beside = self.python.with_name(name)
        return str(beside) if beside.is_file() else name


def find_tensorrt_llm(named: Path | None = None) -> TensorRtLlm | None:
    """Return TensorRT-LLM's interpreter: the named one, or the first that has it; None: none has.

    This process's own is asked first, then every ``python3`` on the PATH, then that of NVIDIA's image.

    Raises:
        DeploymentError: the named one cannot be run, or has no TensorRT-LLM.
    """
    if named is not None:
        found = _ask(named)
        if found is None:
            raise DeploymentError(f"--tensorrt-llm-python: {named} is no Python that has TensorRT-LLM")
        return found
    own = Machine.detect().versions
    if own.tensorrt_llm is not None:
        return TensorRtLlm(Path(sys.executable), own.tensorrt_llm, own.tensorrt)
    return next((found for python in _candidates() if (found := _ask(python)) is not None), None)


def detect_machine(tools: TensorRtLlm | None) -> Machine:
    """Return the machine at hand, with the versions of TensorRT-LLM's interpreter among its own."""
    machine = Machine.detect()
    if tools is None:
        return machine
    versions = {"tensorrt_llm": tools.tensorrt_llm, "tensorrt": tools.tensorrt}
    return replace(machine, versions=machine.versions.model_copy(update=versions))


def _candidates() -> list[Path]:
    own = Path(sys.executable).with_name("python3")
    on_path = [Path(place, "python3") for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    # Path.is_file would raise for what this user may not look into; os.path.isfile says no.
    return [python for python in (*on_path, IMAGES) if os.path.isfile(python) and python != own]


@functools.cache
def _ask(python: Path) -> TensorRtLlm | None:
    """Ask an interpreter for its versions; nothing heavy is imported in it."""
    # Its environment is its own: what leads Python to our packages would lead it there too.
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        # -I: no package of the working directory passes for an installed one.
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_ASK_S, env=own)
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    # Any program may be named, or be called python3.
    version = found.get("tensorrt_llm") if isinstance(found, dict) else None
    return None if version is None else TensorRtLlm(python, version, found.get("tensorrt"))
