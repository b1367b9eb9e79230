"""The machine at hand: versions of what is installed, and the GPUs that the driver shows.

It asks the driver through NVML and the package metadata; nothing heavy is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

ComputeCapability = tuple[int, int]

_DISTRIBUTIONS = {name: name for name in ("inflight", "torch", "tensorrt_llm", "tensorrt")}
_DISTRIBUTIONS |= {"modelopt": "nvidia-modelopt"}


class Versions(BaseModel):
    """What is installed; None: nothing of that name. ``cuda`` is the newest version that the driver takes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inflight: str | None = None
    torch: str | None = None
    modelopt: str | None = None
    tensorrt_llm: str | None = None
    tensorrt: str | None = None
    cuda: str | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Machine:
    """What is here: versions, and the GPUs that can be seen."""

    versions: Versions
    gpus: tuple[str, ...] = ()
    compute_capabilities: tuple[ComputeCapability, ...] = ()
    blindness: str | None = None
    """Why the driver could not be asked; None: it was."""

    @classmethod
    def detect(cls) -> Machine:
        """Ask the driver and the installed packages; nothing heavy is imported."""
        versions = Versions(**{name: _installed_version(package) for name, package in _DISTRIBUTIONS.items()})
        try:
            import pynvml

            pynvml.nvmlInit()
        except ImportError:
            blindness = "NVML's Python binding is missing; install it with: pip install nvidia-ml-py"
            return cls(versions, blindness=blindness)
        except Exception as error:  # no driver, or one that does not answer: no GPU can be used
            return cls(versions, blindness=f"NVML says: {error}")
        try:
            return _ask_driver(pynvml, versions)
        finally:
            pynvml.nvmlShutdown()


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_driver(pynvml: Any, versions: Versions) -> Machine:
    """Return the machine with what the driver says: GPUs, its own version, and the CUDA version that it has."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in _visible(pynvml.nvmlDeviceGetCount())]
    names = tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    capabilities = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles)
    cuda, driver = pynvml.nvmlSystemGetCudaDriverVersion(), str(pynvml.nvmlSystemGetDriverVersion())
    known = versions.model_copy(update={"driver": driver, "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}"})
    return Machine(known, names, capabilities)


def _visible(count: int) -> list[int]:
    """Return the GPUs that CUDA may use: the driver counts those too that ``CUDA_VISIBLE_DEVICES`` hides."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None or not re.fullmatch(r"[\d, ]*", names):
        return list(range(count))
    return [int(name) for name in names.replace(" ", "").split(",") if name and int(name) < count]
