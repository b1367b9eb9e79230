"""The table of GPUs, ``build/gpus.toml``: what a chip can hold, move and compute.

It knows datasheets; not what a model needs of them.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from inflight.errors import DeploymentError, nearest
from inflight.manifest import MINIMUM_COMPUTE_CAPABILITY
from inflight.resources import GPUS

CPU = "cpu"
"""Name of the machine at hand, on which the portable engine runs."""

Arithmetic = Literal["float32", "fp16", "fp8", "int8", "nvfp4"]
"""What a matrix product is computed in; ``fp16`` stands for bfloat16 too."""
Positive = Annotated[float, Field(gt=0)]


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
    """Of the memory, GB/s (1e9 bytes)."""
    dense_tflops: Mapping[Arithmetic, Positive]
    """TFLOP/s without sparsity; a precision that the chip cannot compute is absent."""
    interconnect: str
    interconnect_gb_s: Annotated[float, Field(ge=0)]
    """Between two GPUs of one machine, GB/s in one direction."""
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


def load_gpus(path: Path = GPUS) -> dict[str, Gpu]:
    """Read the table.

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


@functools.cache
def known_gpus() -> Mapping[str, Gpu]:
    """Return the table in the repository, by name."""
    return load_gpus()


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table.

    Raises:
        DeploymentError: no such GPU; the nearest one is named.
    """
    gpus = known_gpus()
    if name not in gpus:
        raise DeploymentError(
            f"GPU {name!r} is not in {GPUS.name}{nearest(name.lower(), [*gpus, CPU])}; known: {', '.join(gpus)}, {CPU}"
        )
    return gpus[name]
