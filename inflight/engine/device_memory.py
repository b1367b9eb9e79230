"""A device's memory: what is free, and what a computation takes at its peak."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch


class DeviceMemory(Protocol):
    """Memory that the engine shares out: to weights, to the largest step, and the rest to the KV cache."""

    def free(self) -> int:
        """Return the bytes that can be had now."""

    def peak_of(self, compute: Callable[[], object]) -> int:
        """Compute, and return the bytes that were taken meanwhile, at the most, beyond those held before.

        Raises:
            torch.OutOfMemoryError: there are not so many.
        """


class CudaMemory:
    """A GPU's, which PyTorch takes in blocks and keeps: what counts is what it has taken, not what is in use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        """See ``DeviceMemory``."""
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free

    def peak_of(self, compute: Callable[[], object]) -> int:
        """See ``DeviceMemory``."""
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
    """Return the memory that the engine has to share out; None: a CPU's, which belongs to the whole machine."""
    return CudaMemory(device) if device.type == "cuda" else None


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
