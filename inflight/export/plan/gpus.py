"""What a chip can hold, move and compute: by the table of GPUs, ``build/gpus.toml``, or measured on this machine.

It knows datasheets; not what a model needs of them.
"""

from __future__ import annotations

import functools
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from inflight.engine.native.bindings import NativeError, instruction_sets
from inflight.errors import DeploymentError, nearest
from inflight.export.plan.native_measure import measure_native
from inflight.export.plan.native_speed import NativeSpeed, Positive
from inflight.export.plan.stopwatch import Stopwatch
from inflight.machine import Machine
from inflight.manifest import MINIMUM_COMPUTE_CAPABILITY
from inflight.resources import GPUS, how_to_install
from inflight.settings.threads import cpu_threads

CPU = "cpu"
"""Name of the machine at hand, on which the portable engine runs."""

Arithmetic = Literal["float32", "fp16", "fp8", "int8", "nvfp4"]
"""What a matrix product is computed in; ``fp16`` stands for bfloat16 too."""
_COPIED_BYTES = 128 << 20
"""How much is copied: far more than any cache holds."""
_MATRIX_SIZE = 768
Progress = Callable[[str, int, int], object]
_MEASURED_SECONDS = 0.3
"""How long each of the three measurements takes."""


class Gpu(BaseModel):
    """One GPU; or, as ``cpu``, the machine at hand."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    nvml_names: tuple[str, ...] = ()
    compute_capability: str = Field("0.0", pattern=r"^\d+\.\d+$")
    marketed_gb: Positive
    memory_mib: Positive
    """MiB that the driver reports: what plans count with."""
    bandwidth_gb_s: Positive
    """The memory's bandwidth in GB/s (1e9 bytes)."""
    native: NativeSpeed | None = None
    """The native step's speed on the machine at hand; None: on a GPU, and where PyTorch computes all steps."""
    dense_tflops: Mapping[Arithmetic, Positive]
    """TFLOP/s without sparsity; a precision that the chip cannot compute is absent."""
    interconnect: str
    interconnect_gb_s: Annotated[float, Field(ge=0)]
    """The bandwidth between two GPUs of one machine, in GB/s in one direction."""
    usd_per_hour: Annotated[float, Field(ge=0)]
    """An assumption; see the table."""
    sources: Mapping[Literal["memory", "dense_tflops", "interconnect", "price"], str]

    @model_validator(mode="after")
    def _is_consistent(self) -> Gpu:
        missing = {"memory", "dense_tflops", "interconnect", "price"} - set(self.sources)
        if missing:
            raise ValueError(f"sources has no entry for {', '.join(sorted(missing))}")
        if not {"float32", "fp16"} & set(self.dense_tflops):
            raise ValueError("dense_tflops has neither fp16 nor float32")
        for arithmetic, first in MINIMUM_COMPUTE_CAPABILITY.items():
            if arithmetic in self.dense_tflops and self.capability < first:
                raise ValueError(f"dense_tflops has {arithmetic}, which begins with compute capability {first}")
        return self

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, e.g. (8, 9)."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the driver reports."""
        return int(self.memory_mib * 2**20)

    @property
    def is_cpu(self) -> bool:
        """Whether this is the machine at hand, with the portable engine."""
        return self.name == CPU


@functools.cache
def known_gpus(path: Path = GPUS) -> Mapping[str, Gpu]:
    """Return the GPUs of the table, by name.

    Raises:
        DeploymentError: it cannot be read, or an entry is wrong; the entry, the key and the fault are named.
    """
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeploymentError(f"{path}: not valid TOML: {error}") from None
    try:
        return TypeAdapter(dict[str, Gpu]).validate_python(
            {name: entry | {"name": name} if isinstance(entry, dict) else entry for name, entry in entries.items()}
        )
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DeploymentError(f"{path}: {place}: {first['msg'].removeprefix('Value error, ')}") from None


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table; ``cpu`` is this machine's processor, measured.

    Raises:
        DeploymentError: no such GPU; the nearest one is named.
    """
    if name == CPU:
        return measure_cpu()
    gpus = known_gpus()
    if name not in gpus:
        raise DeploymentError(
            f"GPU {name!r} is not in {GPUS.name}{nearest(name.lower(), [*gpus, CPU])}; known: {', '.join(gpus)}, {CPU}"
        )
    return gpus[name]


def gpu_here() -> str:
    """Return the name of the table's entry for this machine's GPU; ``cpu`` where there is no NVIDIA driver.

    Raises:
        DeploymentError: there is a GPU, and the table does not have it.
    """
    machine = Machine.detect()
    if not machine.gpus:
        return CPU
    for gpu in known_gpus().values():
        if machine.gpus[0] in gpu.nvml_names:
            return gpu.name
    raise DeploymentError(
        f"this machine's GPU, {machine.gpus[0]!r}, is not in gpus.toml; name a similar one with --gpu"
    )


def measure_cpu(step: str = "auto", threads: int | None = None, progress: Progress = lambda *_: None) -> Gpu:
    """Return this machine as a GPU: memory that is free, what the native step does, and what PyTorch does.

    Takes some seconds. The measurements are of one moment; a calibration carries its own.

    Args:
        step: ``engine.cpu_step`` of the deployment.
        threads: ``engine.threads`` of the deployment; None: as many as the engine chooses.
        progress: told what is measured, how many parts of it are done, and how many there are.

    Raises:
        DeploymentError: PyTorch is missing, or this processor has not the instruction set.
    """
    try:
        import torch
    except ImportError:
        raise DeploymentError(
            f"cpu: its speed is measured with PyTorch, which comes with: {how_to_install('engine')}"
        ) from None
    chosen = native_step(step)
    threads = threads or cpu_threads(native=chosen is not None)
    native = None if chosen is None else measure_native(chosen, threads, progress)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
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
    return cpu_gpu(psutil.virtual_memory().available / 2**20, 2 * _COPIED_BYTES / copies / 1e9, flops, native, threads)


def cpu_gpu(
    memory_mib: float,
    bandwidth_gb_s: float,
    tflops: Mapping[Arithmetic, float],
    native: NativeSpeed | None = None,
    threads: int = 1,
) -> Gpu:
    """Return the machine at hand with these figures."""
    by = f", by kernels for {native.instruction_set}" if native is not None else ""
    return Gpu(
        name=CPU,
        title=f"this machine, {threads} thread{'s' * (threads > 1)} of the portable engine{by}",
        marketed_gb=memory_mib * 2**20 / 1e9,
        memory_mib=memory_mib,
        bandwidth_gb_s=bandwidth_gb_s,
        native=native,
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


def native_step(wanted: str = "auto") -> str | None:
    """Return the instruction set whose kernels compute steps here; None: PyTorch does.

    ``wanted`` is ``engine.cpu_step`` of the deployment.

    Raises:
        DeploymentError: this processor has not the one that it names.
    """
    try:
        found = instruction_sets()
    except (NativeError, OSError):
        found = []
    if wanted == "pytorch" or (wanted == "auto" and not found):
        return None
    if wanted != "auto" and wanted not in found:
        raise DeploymentError(f"engine.cpu_step is {wanted}: no kernels for it are here")
    return found[0] if wanted == "auto" else wanted


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
