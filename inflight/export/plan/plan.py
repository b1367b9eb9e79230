"""What a plan is asked for, and the answer, as values and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from inflight.errors import DeploymentError
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.memory import Memory
from inflight.export.plan.roofline import Efficiency
from inflight.export.plan.shape import Parameters
from inflight.report.units import with_floats

_SPEEDS = ("unloaded", "full", "capacity", "load", "curve", "fleet", "efficiency")
"""The parts of a plan that follow from its rooflines."""


@dataclass(frozen=True)
class PlanRequest:
    """Precision, load and objectives.

    Raises:
        DeploymentError: on construction, naming the field, its value and the limit.
    """

    precision: str = "auto"
    """auto: the checkpoint's 16-bit type, float32 on cpu; or a name of ``precision.PRECISIONS``."""
    kv_cache: str = "auto"
    """auto: FP8 with precisions that are calibrated with activations in FP8, else 16 bits."""
    input_tokens: int = 1024
    """Mean length of a prompt."""
    output_tokens: int = 256
    """Mean length of an answer."""
    p95_input_tokens: int | None = None
    """95 % of the prompts are no longer; None: all have the mean length."""
    p95_output_tokens: int | None = None
    rate: float | None = None
    """Requests per second to serve; None: as many as the GPUs can."""
    cache_hit_rate: float = 0.0
    """Share of the prompts' tokens that the prefix cache has."""
    slo_ttft_ms: float | None = None
    """Time to first token, of a long prompt (``PlanRequest.tail``)."""
    slo_itl_ms: float | None = None
    """Mean time between two tokens of a stream."""
    price: float | None = None
    """USD per GPU hour; None: the table's assumption."""
    gpus: int | None = None
    """GPUs at hand; None: as many as are needed."""
    tensor_parallel_size: int | None = None
    """GPUs that share each layer; None: chosen."""
    excluded: tuple[str, ...] = ()
    """Patterns of the names of linear layers that stay at 16 bits."""
    block_size: int = 16
    """Tokens per block of the KV cache."""
    free_windows: bool = False
    """Whether the engine lets go of KV that has left a layer's window. The portable engine does not, nor does
    TensorRT-LLM as it is set up here, without ``max_attention_window``."""

    def __post_init__(self) -> None:
        def require(names: str, holds: Callable[[float], bool], limit: str) -> None:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise DeploymentError(f"{name} is {value}; it must be {limit}")

        mean_input, mean_output = self.input_tokens, self.output_tokens
        require("input_tokens output_tokens block_size", lambda value: value >= 1, "at least 1")
        require("rate slo_ttft_ms slo_itl_ms", lambda value: 0 < value < math.inf, "above 0 and finite")
        require("price", lambda value: 0 <= value < math.inf, "at least 0 and finite")
        require("gpus tensor_parallel_size", lambda value: value >= 1, "at least 1")
        require("cache_hit_rate", lambda value: 0 <= value < 1, "at least 0 and below 1")
        require("p95_input_tokens", lambda value: value >= mean_input, f"at least the mean, {mean_input}")
        require("p95_output_tokens", lambda value: value >= mean_output, f"at least the mean, {mean_output}")

    @property
    def tail(self) -> tuple[str, str]:
        """Names of the lengths taken for long prompts and answers: "P95" or, where no P95 is given, "mean"."""
        return "P95" if self.p95_input_tokens else "mean", "P95" if self.p95_output_tokens else "mean"

    @property
    def longest_input(self) -> int:
        """Tokens of a long prompt (``tail``)."""
        return self.p95_input_tokens or self.input_tokens

    @property
    def longest(self) -> int:
        """Tokens of a long prompt and a long answer (``tail``)."""
        return self.longest_input + (self.p95_output_tokens or self.output_tokens)

    @property
    def uncached_input(self) -> float:
        """Mean prompt tokens to compute."""
        return self.input_tokens * (1 - self.cache_hit_rate)

    @property
    def has_load(self) -> bool:
        """Whether there is a rate to hold or an objective to meet."""
        return any(value is not None for value in (self.rate, self.slo_ttft_ms, self.slo_itl_ms))


@dataclass(frozen=True)
class Point:
    """A steady state of one copy of the model."""

    batch: float
    """Mean sequences that decode."""
    requests_per_second: float
    tokens_per_second: float
    """The tokens that are generated."""
    ttft_ms: float
    """The time to the first token of a long prompt (``PlanRequest.tail``), where prompts come at random times
    (Poisson). In ``Plan.full`` it is the mean over all prompts."""
    itl_ms: float
    """Mean time between two tokens of a stream."""
    binds: str
    """What most of a step's time goes to: bandwidth, compute, overhead or communication."""


@dataclass(frozen=True)
class Fleet:
    """The GPUs for the load that was asked for."""

    replicas: int
    gpus: int
    """The number of GPUs of all replicas."""
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
    """The bytes of the weights on all GPUs of a group."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_batch_size: int
    batch_limit: str
    """What keeps the batch from being larger: memory, slo, step (the token budget), throughput, or default: as many as
    the engine runs without a plan."""
    max_tokens_per_step: int
    prefill_chunk_tokens: int | None
    """Prompt tokens of a step in which others decode, at most; None: no more is said of them."""
    max_sequence_length: int
    kv_cache_tokens: int
    kv_cache_blocks: int
    free_gpu_memory_fraction: float
    memory: Memory
    fitting_sequences: int
    """The number of long sequences (``PlanRequest.tail``) that the KV cache holds at once."""
    unloaded: Point
    """What a request meets that is alone."""
    full: Point | None
    """The mean figures of ``max_batch_size`` clients, each of which asks again at once; see ``full_batch``. None: on a
    GPU."""
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
    unpredicted: str | None = None
    """Why its speeds are no predictions, so that only memory is planned; None: they are."""

    @property
    def gpus_per_replica(self) -> int:
        """GPUs that serve one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def price(self) -> float:
        """What plans are ranked by, in USD: per hour for the rate; without one, per million generated tokens."""
        fleet = self.fleet
        return fleet.usd_per_hour if self.request.rate is not None else fleet.usd_per_million_tokens or 0.0

    @property
    def predicted(self) -> bool:
        """Whether its speeds are predictions."""
        return self.unpredicted is None

    @property
    def speed(self) -> str:
        """What is said in place of speeds that are not predicted."""
        return f"not predicted: {self.unpredicted}; batch and step are those of bf16"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON: equal plans give equal texts; numbers have four significant digits, sizes all.

        Where speed is not predicted, ``speed`` says so, and what follows from it is null.
        """
        data = asdict(self) | {"gpu": self.gpu.name}
        data["parameters"]["total"] = self.parameters.total
        if data.pop("unpredicted") is not None:
            data |= dict.fromkeys(_SPEEDS) | {"speed": self.speed}
        return with_floats(data, lambda number: float(f"{number:.4g}"))
