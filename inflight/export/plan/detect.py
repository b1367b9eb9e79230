"""What this machine has: its NVIDIA GPU by name, or its CPU by measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import psutil

from inflight.errors import DeploymentError
from inflight.export.plan.clock import Stopwatch
from inflight.export.plan.gpus import CPU, Arithmetic, Gpu, find_gpu, known_gpus
from inflight.machine import Machine
from inflight.resources import how_to_install

_COPIED_BYTES = 128 << 20
"""Far beyond any cache."""
_MATRIX_SIZE = 768
_MEASURED_SECONDS = 0.3
"""Each of three measurements."""


def gpu_here() -> str:
    """Return the name of the table's entry for this machine's GPU; ``cpu`` where there is no NVIDIA driver.

    Raises:
        DeploymentError: there is a GPU, and the table does not have it.
    """
    machine = Machine.detect()
    return gpu_of_driver(machine.gpus[0]).name if machine.gpus else CPU


def find_or_measure(name: str) -> Gpu:
    """Return the GPU that ``--gpu`` names: of the table, ``cpu`` for this machine's processor, or ``auto`` for its GPU,
    where it has one, else its processor.

    Raises:
        DeploymentError: there is no such GPU.
    """
    name = gpu_here() if name == "auto" else name
    return measure_cpu() if name == CPU else find_gpu(name)


def gpu_of_driver(name: str) -> Gpu:
    """Return the table's entry for a GPU that the driver calls ``name``.

    Raises:
        DeploymentError: the table does not have it.
    """
    for gpu in known_gpus().values():
        if name in gpu.nvml_names:
            return gpu
    raise DeploymentError(f"this machine's GPU, {name!r}, is not in gpus.toml; name a similar one with --gpu")


def cpu_threads() -> int:
    """Return the threads of the portable engine: all cores but one, which is for the server."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def measure_cpu() -> Gpu:
    """Return this machine as a GPU: memory that is free, bandwidth of a copy and FLOP/s of a matrix product.

    Takes about a second. The measurements are of one moment; a calibration carries its own.

    Raises:
        DeploymentError: PyTorch is missing.
    """
    try:
        import torch
    except ImportError:
        raise DeploymentError(
            f"cpu: its speed is measured with PyTorch, which comes with: {how_to_install('engine')}"
        ) from None
    before = torch.get_num_threads()
    torch.set_num_threads(cpu_threads())
    try:
        source = torch.ones(_COPIED_BYTES // 4)
        target = torch.empty_like(source)
        copies = _fastest(lambda: target.copy_(source))
        flops: dict[Arithmetic, float] = {}
        kinds: tuple[tuple[Arithmetic, torch.dtype], ...] = (("float32", torch.float32), ("fp16", torch.bfloat16))
        for kind, dtype in kinds:
            left = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE, dtype=dtype)
            flops[kind] = 2 * _MATRIX_SIZE**3 / _fastest(lambda left=left: left @ left) / 1e12  # type: ignore[misc]
    finally:
        torch.set_num_threads(before)
    # A copy reads and writes each byte.
    return cpu_gpu(psutil.virtual_memory().available / 2**20, 2 * _COPIED_BYTES / copies / 1e9, flops)


def cpu_gpu(memory_mib: float, bandwidth_gb_s: float, tflops: Mapping[Arithmetic, float]) -> Gpu:
    """Return the machine at hand with these figures."""
    return Gpu(
        name=CPU,
        title=f"this machine, {cpu_threads()} thread{'s' * (cpu_threads() > 1)} of the portable engine",
        marketed_gb=memory_mib * 2**20 / 1e9,
        memory_mib=memory_mib,
        bandwidth_gb_s=bandwidth_gb_s,
        dense_tflops=dict(tflops),
        interconnect="none",
        interconnect_gb_s=0,
        usd_per_hour=0,
        sources={
            "memory": "free now; bandwidth of a copy, measured",
            "dense_tflops": "a matrix product, measured",
            "interconnect": "one machine",
            "price": "unknown; give one with --price",
        },
    )


def _fastest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run: what disturbs a machine only ever makes it slower."""
    work()
    times: list[float] = []
    end = time.monotonic() + _MEASURED_SECONDS
    while not times or time.monotonic() < end:
        watch = Stopwatch()
        work()
        times.append(watch.seconds)
    return min(times)
