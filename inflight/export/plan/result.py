"""Plan: the answer, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from inflight.export.plan.gpus import Gpu
from inflight.export.plan.memory import Memory
from inflight.export.plan.precision import PRECISIONS
from inflight.export.plan.request import PlanRequest
from inflight.export.plan.roofline import Efficiency
from inflight.export.plan.serving import Point
from inflight.export.plan.shape import Parameters

UNPREDICTED = (
    "not predicted: the portable engine decodes quantized weights for each call and adds up in float64 where it rounds "
    "inputs or the KV cache, several times slower than bf16; batch and step are those of bf16"
)
_SPEEDS = ("unloaded", "capacity", "load", "curve", "fleet", "efficiency")
"""Of a plan: what follows from its rooflines."""


def is_predicted(gpu: Gpu, precision: str, kv_cache: str) -> bool:
    """Return whether rooflines know the arithmetic: on a CPU, not that of quantized weights or an FP8 cache."""
    return not (gpu.is_cpu and (PRECISIONS[precision].quantized or kv_cache == "fp8"))


@dataclass(frozen=True)
class Fleet:
    """GPUs for the load asked for."""

    replicas: int
    gpus: int
    """Of all replicas."""
    saturated: bool
    """Whether the GPUs at hand cannot hold the rate."""
    usd_per_hour: float
    usd_per_million_tokens: float | None
    """Generated tokens; None where they cost nothing or nothing is served."""


@dataclass(frozen=True)
class Plan:
    """How to serve a model on a kind of GPU. Sizes in bytes."""

    gpu: Gpu
    request: PlanRequest
    precision: str
    kv_cache: str
    """Type of the KV cache's numbers."""
    parameters: Parameters
    weight_bytes: int
    """On all GPUs of a group."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_batch_size: int
    batch_limit: str
    """What keeps the batch from being larger: memory, slo, step (the token budget) or throughput."""
    max_tokens_per_step: int
    max_sequence_length: int
    kv_cache_tokens: int
    kv_cache_blocks: int
    free_gpu_memory_fraction: float
    memory: Memory
    fitting_sequences: int
    """Of P95 length, that the KV cache holds at once."""
    unloaded: Point
    """A request alone."""
    capacity: Point
    """The largest steady state that leaves room for the load's fluctuation, of one replica."""
    load: Point | None
    """One replica at its share of the rate; None without a rate, or where it is saturated."""
    curve: tuple[Point, ...]
    """Steady states of one replica, by batch."""
    fleet: Fleet
    efficiency: Efficiency
    calibrated: bool
    """Whether the efficiencies are fitted to a measurement; else they are assumed."""

    @property
    def predicted(self) -> bool:
        """Whether its speeds are predictions; else only memory is planned."""
        return is_predicted(self.gpu, self.precision, self.kv_cache)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: equal plans give equal texts; numbers have four significant digits, sizes all.

        Where speed is not predicted, ``speed`` says so, and what follows from it is null.
        """
        data = asdict(self) | {"gpu": self.gpu.name, "parameters": asdict(self.parameters)}
        data["parameters"]["total"] = self.parameters.total
        if not self.predicted:
            data |= dict.fromkeys(_SPEEDS) | {"speed": UNPREDICTED}
        return _rounded(data)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
