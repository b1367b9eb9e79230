"""The device: which one it is, what it can do, what memory is free on it, and what a computation takes at its peak."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from inflight.errors import DeploymentError
from inflight.settings.deployment import check_device

BFLOAT16, FP8 = (8, 0), (8, 9)
"""Compute capabilities from which on GPUs have these types (CUDA C++ programming guide)."""


class DeviceMemory:
    """A GPU's memory, which the engine divides among weights, the largest step, and the KV cache.

    PyTorch takes it in blocks and keeps them: what counts is what it has taken, not what is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """Return the bytes that can be had now."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, compute: Callable[[], object]) -> int:
        """Compute, and return the most bytes that were taken meanwhile, beyond those held before.

        Raises:
            torch.OutOfMemoryError: there are not so many.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            compute()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_reserved(self._device) - before
        finally:
            torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory that the engine divides; None: a CPU's, which belongs to the whole machine."""
    return DeviceMemory(device) if device.type == "cuda" else None


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be had on a device; on the CPU, within the limit of the process's control group."""
    memory = device_memory(device)
    if memory is not None:
        return memory.free()
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:  # cgroup v2; "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        limit, current = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        return min(available, limit - current)
    except (OSError, ValueError):
        return available


def resolve_device(name: str) -> torch.device:
    """Return the device called ``name``; auto: a GPU if there is one.

    Raises:
        DeploymentError: there is no such device.
    """
    try:
        check_device(name)
    except ValueError as error:
        raise DeploymentError(f"engine.device is {name!r}; {error}") from None
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise DeploymentError(f"engine.device is {name!r}, and PyTorch finds no CUDA device")
    return torch.device(name)


def has_compiler() -> bool:
    """Whether Triton's compiler is installed, which PyTorch's CPU builds come without; it is not imported."""
    return importlib.util.find_spec("triton") is not None
