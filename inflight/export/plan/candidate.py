"""One group of GPUs, tried: its batch, its token budget, its latency, and how many of it the load needs."""

from __future__ import annotations

from inflight.export.plan.gpus import Gpu
from inflight.export.plan.memory import FREE_MEMORY_FRACTION, MemoryPlanner, group_weight_bytes
from inflight.export.plan.placement import Parallel, Shape
from inflight.export.plan.request import PlanRequest
from inflight.export.plan.result import Fleet, Plan
from inflight.export.plan.roofline import ASSUMED_CPU, ASSUMED_GPU, Efficiency, Roofline, Step
from inflight.export.plan.serving import Point, Serving, steady_batch
from inflight.export.plan.shape import count_parameters

LARGEST_BATCH = 1024
LARGEST_STEP = 8192
"""TensorRT-LLM's own default of max_num_tokens; more only delays the decodes that share the step."""
SMALLEST_STEP = 256
_WORTHWHILE = 1.05
"""A batch is doubled while that brings so many times the throughput; beyond, it only adds latency."""
_LONGEST_GAP = 2
"""Times the objective for the mean ITL that a step full of prompt tokens may take."""


class Candidate:
    """One group of GPUs for a request."""

    def __init__(
        self, shape: Shape, gpu: Gpu, parallel: Parallel, request: PlanRequest, efficiency: Efficiency | None
    ) -> None:
        """
        Args:
            shape: the model in its precision.
            gpu: each of the group's.
            parallel: the group.
            request: load and objectives.
            efficiency: from a calibration; None: assumed.
        """
        self._shape, self._gpu, self._parallel, self._request = shape, gpu, parallel, request
        self._calibrated = efficiency is not None
        self._efficiency = efficiency or (ASSUMED_CPU if gpu.is_cpu else ASSUMED_GPU)
        self._memory = MemoryPlanner(shape, gpu, parallel, request.block_size)
        hidden_bytes = shape.config.hidden_size * shape.precision.base
        self._roofline = Roofline(self._memory.stages, gpu, parallel, self._efficiency, hidden_bytes)
        self._step_tokens = self._choose_step()
        self._fitting = self._fitting_at(self._step_tokens)
        self._serving = Serving(self._roofline, request, self._step_tokens)

    @property
    def fits(self) -> bool:
        """Whether weights and one sequence of P95 length fit."""
        return self._fitting >= 1

    def plan(self) -> Plan | None:
        """Return the plan; None: the objectives cannot be met."""
        serving, request = self._serving, self._request
        batch, limit = self._choose_batch()
        if batch == 0:
            return None
        steady = steady_batch(batch)
        capacity = serving.point(steady)
        wanted = batch * request.longest if self._gpu.is_cpu else None
        memory = self._memory.layout(self._step_tokens, min(LARGEST_BATCH, self._step_tokens), wanted)
        fleet, load = self._fleet(capacity, steady)
        config = self._shape.config
        return Plan(
            gpu=self._gpu,
            request=request,
            precision=self._shape.precision.name,
            kv_cache=self._shape.kv_cache,
            parameters=count_parameters(config),
            weight_bytes=group_weight_bytes(self._memory.stages, self._parallel),
            tensor_parallel_size=self._parallel.tensor,
            pipeline_parallel_size=self._parallel.pipeline,
            max_batch_size=batch,
            batch_limit=limit,
            max_tokens_per_step=self._step_tokens,
            max_sequence_length=min(config.max_position_embeddings, memory.kv_tokens),
            kv_cache_tokens=memory.kv_tokens,
            kv_cache_blocks=memory.kv_tokens // request.block_size,
            free_gpu_memory_fraction=FREE_MEMORY_FRACTION,
            memory=memory,
            fitting_sequences=self._fitting,
            unloaded=serving.alone(),
            capacity=capacity,
            load=load,
            curve=tuple(serving.point(size) for size in _doublings(self._most)),
            fleet=fleet,
            efficiency=self._efficiency,
            calibrated=self._calibrated,
        )

    def _choose_step(self) -> int:
        """Return the token budget of a step: a power of two.

        It is the smallest with which prefills are bound by arithmetic twice over, so that a larger one would not be
        faster, and which does not limit the batch; with an objective for the ITL, no more than keeps the longest gap
        between two tokens, a step full of prompt tokens, within twice that.
        """
        tokens = SMALLEST_STEP
        while tokens < LARGEST_STEP and not self._is_ample(tokens):
            tokens *= 2
        slo = self._request.slo_itl_ms
        while slo is not None and tokens > SMALLEST_STEP and self._prefill_ms(tokens) > _LONGEST_GAP * slo:
            tokens //= 2
        return tokens

    def _is_ample(self, tokens: int) -> bool:
        serving = Serving(self._roofline, self._request, tokens)
        wanted = _worthwhile(serving, min(self._fitting_at(tokens), LARGEST_BATCH))
        return serving.budget_batch >= wanted and self._prefill_ms(2 * tokens) > 1.9 * self._prefill_ms(tokens)

    def _prefill_ms(self, tokens: int) -> float:
        return 1000 * self._roofline.time(Step(0, prefill_tokens=tokens, prefill_context=tokens / 2)).total

    def _fitting_at(self, tokens: int) -> int:
        return self._memory.sequences(self._request.longest, tokens, min(LARGEST_BATCH, tokens))

    @property
    def _most(self) -> int:
        """The largest batch that memory and the token budget allow."""
        return min(self._fitting, self._serving.budget_batch, LARGEST_BATCH)

    def _choose_batch(self) -> tuple[int, str]:
        """Return the largest batch to run, and what limits it."""
        most, serving = self._most, self._serving
        limit = "memory" if most == self._fitting else ("step" if most == serving.budget_batch else "throughput")
        batch = serving.largest(most)
        if batch < most:
            limit = "slo"
        worthwhile = _worthwhile(serving, batch)
        return (worthwhile, "throughput") if worthwhile < batch else (batch, limit)

    def _fleet(self, capacity: Point, steady: float) -> tuple[Fleet, Point | None]:
        """Return the replicas for the rate, what they cost, and what one of them does."""
        request, size = self._request, self._parallel.gpus
        price = self._gpu.usd_per_hour if request.price is None else request.price
        at_hand = None if request.gpus is None else max(1, request.gpus // size)
        if request.rate is None:
            replicas = at_hand or 1
            served, load, saturated = replicas * capacity.tokens_per_second, None, False
        else:
            needed = -int(-request.rate // capacity.requests_per_second)
            replicas = needed if at_hand is None else min(needed, at_hand)
            saturated = replicas < needed
            load = None if saturated else self._serving.at_rate(request.rate / replicas, steady)
            rate = replicas * capacity.requests_per_second if saturated else request.rate
            served = rate * request.output_tokens
        hourly = replicas * size * price
        fleet = Fleet(
            replicas=replicas,
            gpus=replicas * size,
            saturated=saturated,
            usd_per_hour=hourly,
            usd_per_million_tokens=hourly / (served * 3600) * 1e6 if hourly else None,
        )
        return fleet, load


def _worthwhile(serving: Serving, most: int) -> int:
    """Return the batch beyond which a larger one hardly brings more throughput; at most ``most``."""
    size, speed = 1, serving.tokens_per_second(1)
    while 2 * size <= most:
        doubled = serving.tokens_per_second(2 * size)
        if doubled < _WORTHWHILE * speed:
            return size
        size, speed = 2 * size, doubled
    return most


def _doublings(most: int) -> list[int]:
    sizes = [1]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if most == 1 else [*sizes, most]
