"""Planning: how to serve a model on a GPU, from its ``config.json`` and the GPU's datasheet alone.

    plan = make_plan(model_config, find_gpu("h100"), PlanRequest(precision="fp8"))

It knows shapes and rooflines; not how a checkpoint is quantized or an engine compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError
from inflight.export.plan.computing import assumed_efficiency, by_portable_engine_alone, why_unpredicted
from inflight.export.plan.full_batch import FullBatch
from inflight.export.plan.gpus import Gpu, known_gpus
from inflight.export.plan.memory import FREE_MEMORY_FRACTION, LARGEST_BATCH, MemoryPlanner
from inflight.export.plan.plan import Fleet, Plan, PlanRequest, Point
from inflight.export.plan.precision import StoredWeights, resolve_kv_cache, resolve_precision
from inflight.export.plan.roofline import Efficiency, Roofline, Step
from inflight.export.plan.serving import Serving, steady_batch
from inflight.export.plan.shape import MAX_GPUS, Parallel, Shape, count_parameters, grouped
from inflight.settings.batching import ON_CPU, affordable_chunk
from inflight.settings.kv_cache import TOKENS_PER_SEQUENCE

LARGEST_STEP = 8192
"""TensorRT-LLM's own default of max_num_tokens; more only delays the decodes that share the step."""
SMALLEST_STEP = 256
_WORTHWHILE = 1.05
"""A batch is doubled while that brings so many times the throughput; beyond, it only adds latency."""
_LONGEST_GAP = 2
"""Times the objective for the mean ITL that a step full of prompt tokens may take."""


class DoesNotFit(DeploymentError):
    """A model is larger than the memory of all GPUs that may be used."""


def make_plan(
    model_config: ModelConfig,
    gpu: Gpu,
    request: PlanRequest,
    efficiency: Efficiency | None = None,
    stored: StoredWeights | None = None,
) -> Plan:
    """Plan a model on a GPU; ``stored``: how its checkpoint holds the weights, where it is quantized already.

    Without a rate or objectives, the group is the smallest that fits. With them, it is the one that serves the rate
    with the fewest GPUs, or makes the most of each. Pipeline parallelism is for what tensor parallelism cannot hold.
    Without the efficiencies of a calibration, they are assumed.

    Raises:
        DoesNotFit: the model does not fit.
        DeploymentError: the chip cannot compute the precision, or an objective cannot be met even by a request alone;
            the message says which.
    """
    shape = _shape(model_config, gpu, request, stored)
    limit = (
        1 if by_portable_engine_alone(model_config, gpu, shape.precision) else min(request.gpus or MAX_GPUS, MAX_GPUS)
    )
    sizes, wanted = shape.tensor_parallel_sizes(limit), request.tensor_parallel_size
    if wanted is not None:
        if wanted not in sizes:
            raise DeploymentError(
                f"tensor_parallel_size is {wanted}; this model in {shape.precision.name} on up to {limit} GPUs can be "
                f"shared by {', '.join(map(str, sizes))}"
            )
        sizes = [wanted]
    fitted = False
    for pipeline in range(1, min(limit, model_config.num_layers) + 1):
        groups = [Parallel(tensor, pipeline) for tensor in sizes if tensor * pipeline <= limit]
        candidates = (Candidate(shape, gpu, parallel, request, efficiency) for parallel in groups)
        fitting = [candidate for candidate in candidates if candidate.fits]
        fitted = fitted or bool(fitting)
        if not request.has_load:
            fitting = fitting[:1]
        plans = [plan for plan in (candidate.plan() for candidate in fitting) if plan is not None]
        if plans:
            return min(plans, key=_merit)
    raise _unplanned(shape, gpu, request, limit, fitted)


def _shape(config: ModelConfig, gpu: Gpu, request: PlanRequest, stored: StoredWeights | None) -> Shape:
    limit = config.max_position_embeddings
    if request.longest > limit:
        prompt, answer = request.tail
        raise DeploymentError(
            f"a {prompt} prompt and a {answer} answer have {request.longest} tokens; the model's longest sequence has "
            f"{limit}"
        )
    stored = stored and _as_stored(stored, config, gpu, request)
    precision = resolve_precision(request.precision, gpu, config.dtype) if stored is None else stored.precision
    if stored is None:
        precision = grouped(precision, config, request.excluded)
    kv_cache, kv_bytes = resolve_kv_cache(request.kv_cache, gpu, precision)
    if request.excluded and not precision.quantized:
        raise DeploymentError(f"exclude: precision {precision.name} quantizes nothing")
    if request.free_windows and gpu.is_cpu:
        raise DeploymentError("free_windows: the portable engine keeps all blocks of a sequence; leave it out for cpu")
    if request.has_load and (why := why_unpredicted(config, gpu, precision, kv_cache)) is not None:
        raise DeploymentError(
            f"{gpu.name}: the speed of {precision.name} with a {kv_cache} KV cache is not predicted, so no rate or "
            f"objective can be planned for; leave them out ({why})"
        )
    return Shape(config, precision, kv_cache, kv_bytes, request.excluded, request.free_windows, stored)


def _as_stored(stored: StoredWeights, config: ModelConfig, gpu: Gpu, request: PlanRequest) -> StoredWeights:
    """Return how a chip computes weights that are quantized already. Raises DeploymentError."""
    name = stored.precision.name
    if request.precision != "auto":
        raise DeploymentError(f"precision {request.precision}: the checkpoint is quantized already ({name}); use auto")
    if request.excluded:
        raise DeploymentError(f"exclude: the checkpoint is quantized already ({name})")
    return stored.on(gpu, config.dtype)


def _merit(plan: Plan) -> tuple[bool, float, int]:
    """What makes a plan better than another, smallest first: it holds the rate, with the fewest GPUs; without a rate,
    it makes more of each GPU."""
    size = plan.gpus_per_replica
    cost = plan.fleet.gpus if plan.request.rate is not None else -plan.capacity.tokens_per_second / size
    return plan.fleet.saturated, cost, size


def _unplanned(shape: Shape, gpu: Gpu, request: PlanRequest, limit: int, fitted: bool) -> DeploymentError:
    """Return the error that says why no group of GPUs will do."""
    if fitted:
        return DeploymentError(
            f"{gpu.name}: no group of up to {limit} GPUs meets the objectives, not even for one request alone "
            f"(TTFT {request.slo_ttft_ms or 'any'} ms, ITL {request.slo_itl_ms or 'any'} ms)"
        )
    needed = shape.stages(Parallel())[0].weight_bytes
    more = "" if by_portable_engine_alone(shape.config, gpu, shape.precision) else " or more GPUs"
    return DoesNotFit(
        f"{gpu.name}: {needed / 2**30:.1f} GiB of weights and one sequence of {request.longest} tokens do not fit into "
        f"{limit} GPU{'s' * (limit > 1)} of {gpu.memory_bytes / 2**30:.1f} GiB; use a smaller precision{more}"
    )


def rank(
    config: ModelConfig, request: PlanRequest, named: Sequence[Plan] = (), stored: StoredWeights | None = None
) -> tuple[Sequence[Plan], Mapping[str, str]]:
    """Plan the model on every GPU of the table, at its prices; those whose speeds are not predicted have no rank.

    The plans of GPUs that were ``named`` have the request's price and their own efficiencies: they are taken as they
    are.

    Returns:
        The plans in the order of their price: with a rate, the price per hour of as many GPUs as hold it; else the
        price per million generated tokens of a fully used group. And the reasons, by name, why other GPUs have none.
    """
    planned = {plan.gpu.name: plan for plan in named}
    plans, refused = [], {}
    for gpu in known_gpus().values():
        try:
            plan = planned.get(gpu.name) or make_plan(config, gpu, replace(request, price=None), stored=stored)
        except DeploymentError as error:
            refused[gpu.name] = str(error).removeprefix(f"{gpu.name}: ")
            continue
        if plan.unpredicted is not None:
            refused[gpu.name] = plan.speed
        elif plan.fleet.saturated:
            refused[gpu.name] = f"{plan.fleet.gpus} GPUs do not hold {request.rate:g} requests/s"
        else:
            plans.append(plan)
    return sorted(plans, key=lambda plan: (plan.price, plan.gpu.name)), refused


class Candidate:
    """One group of GPUs for a request."""

    def __init__(
        self, shape: Shape, gpu: Gpu, parallel: Parallel, request: PlanRequest, efficiency: Efficiency | None
    ) -> None:
        self._shape, self._gpu, self._parallel, self._request = shape, gpu, parallel, request
        self._calibrated = efficiency is not None
        self._efficiency = efficiency or assumed_efficiency(shape.config, gpu, shape.precision)
        self._memory = MemoryPlanner(shape, gpu, parallel, request.block_size)
        self._roofline = Roofline(self._memory.stages, gpu, parallel, self._efficiency)
        self._step_tokens = self._choose_step()
        self._fitting = self._fitting_at(self._step_tokens)
        self._chunk = self._choose_chunk()
        self._serving = Serving(self._roofline, request, self._step_tokens, self._chunk)

    @property
    def fits(self) -> bool:
        """Whether weights and one long sequence fit."""
        return self._fitting >= 1

    def plan(self) -> Plan | None:
        """Return the plan; None: the objectives cannot be met."""
        serving, request = self._serving, self._request
        batch, limit = self._choose_batch()
        if batch == 0:
            return None
        steady = steady_batch(min(batch, self._most))
        capacity = serving.point(steady)
        memory = self._memory.layout(self._step_tokens, self._wanted_tokens(batch), batch)
        fleet, load = self._fleet(capacity, steady)
        sizes = [*(2**power for power in range((self._most - 1).bit_length())), self._most]
        config = self._shape.config
        return Plan(
            gpu=self._gpu,
            request=request,
            precision=self._shape.precision.name,
            kv_cache=self._shape.kv_cache,
            parameters=count_parameters(config),
            weight_bytes=self._parallel.tensor * sum(stage.weight_bytes for stage in self._memory.stages),
            tensor_parallel_size=self._parallel.tensor,
            pipeline_parallel_size=self._parallel.pipeline,
            max_batch_size=batch,
            batch_limit=limit,
            max_tokens_per_step=self._step_tokens,
            prefill_chunk_tokens=self._chunk,
            max_sequence_length=min(config.max_position_embeddings, memory.kv_tokens),
            kv_cache_tokens=memory.kv_tokens,
            kv_cache_blocks=memory.kv_tokens // request.block_size,
            free_gpu_memory_fraction=FREE_MEMORY_FRACTION,
            memory=memory,
            fitting_sequences=self._fitting,
            unloaded=serving.alone(),
            full=self._full_batch(batch),
            capacity=capacity,
            load=load,
            curve=tuple(serving.point(size) for size in sizes),
            fleet=fleet,
            efficiency=self._efficiency,
            calibrated=self._calibrated,
            unpredicted=why_unpredicted(config, self._gpu, self._shape.precision, self._shape.kv_cache),
        )

    def _full_batch(self, batch: int) -> Point | None:
        """Return what a full batch meets on a CPU; None on a GPU, whose engine has a scheduler of its own."""
        if not self._gpu.is_cpu:
            return None
        return FullBatch(self._roofline, self._request, batch, self._step_tokens, self._chunk).measure()

    def _choose_step(self) -> int:
        """Return the token budget of a step: a power of two.

        It is the smallest with which prefills are bound by arithmetic twice over, so that a larger one would not be
        faster, and which does not limit the batch; on a CPU, no smaller than the engine's own. With an objective for
        the ITL, it is no more than keeps the longest gap between two tokens, a step full of prompt tokens, within twice
        that.
        """
        tokens = ON_CPU.tokens if self._gpu.is_cpu else SMALLEST_STEP
        while tokens < LARGEST_STEP and not self._is_ample(tokens):
            tokens *= 2
        slo = self._request.slo_itl_ms
        while slo is not None and tokens > SMALLEST_STEP and self._prefill_ms(tokens) > _LONGEST_GAP * slo:
            tokens //= 2
        return tokens

    def _choose_chunk(self) -> int | None:
        """Return the prompt tokens of a step in which others decode, as the engine chooses them on a CPU.

        None: it has no such limit on a GPU, and recurrent layers have one of their own.
        """
        if not self._gpu.is_cpu or self._shape.config.recurrent:
            return None
        return affordable_chunk(self._prefill_ms(SMALLEST_STEP) / 1000 / SMALLEST_STEP, self._step_tokens)

    def _is_ample(self, tokens: int) -> bool:
        serving = Serving(self._roofline, self._request, tokens)
        wanted = _worthwhile(serving, min(self._fitting_at(tokens), LARGEST_BATCH))
        return serving.budget_batch >= wanted and self._prefill_ms(2 * tokens) > 1.9 * self._prefill_ms(tokens)

    def _prefill_ms(self, tokens: int) -> float:
        return 1000 * self._roofline.time(Step(0, prefill_tokens=tokens, prefill_context=tokens / 2)).total

    def _fitting_at(self, tokens: int) -> int:
        return self._memory.sequences(self._request.longest, tokens)

    @property
    def _most(self) -> int:
        """The largest batch that memory and the token budget allow."""
        return min(self._fitting, self._serving.budget_batch, LARGEST_BATCH)

    def _choose_batch(self) -> tuple[int, str]:
        """Return the largest batch to run, and what limits it.

        On a CPU, where no rate or objective says otherwise, it is at least what the engine runs without a plan.
        """
        most, serving = self._most, self._serving
        limit = "memory" if most == self._fitting else ("step" if most == serving.budget_batch else "throughput")
        batch = serving.largest(most)
        if batch < most:
            limit = "slo"
        worthwhile = _worthwhile(serving, batch)
        least = min(ON_CPU.sequences, self._fitting)
        if self._gpu.is_cpu and not self._request.has_load and worthwhile < least:
            return least, "memory" if least == self._fitting else "default"
        return (worthwhile, "throughput") if worthwhile < batch else (batch, limit)

    def _wanted_tokens(self, batch: int) -> int | None:
        """Return how many tokens the KV cache is wanted to hold; None: all that fit.

        On a CPU the machine needs memory for others: it is wanted to hold a full batch, as the engine has it without a
        plan or as the request does, and a sequence as long as the model takes.
        """
        if not self._gpu.is_cpu:
            return None
        full = batch * max(self._request.longest, TOKENS_PER_SEQUENCE)
        return max(full, self._shape.config.max_position_embeddings)

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
        per_million = hourly / (served * 3600) * 1e6 if hourly else None
        return Fleet(replicas, replicas * size, saturated, hourly, per_million), load


def _worthwhile(serving: Serving, most: int) -> int:
    """Return the batch beyond which a larger one hardly brings more throughput; at most ``most``."""
    size = 1
    while 2 * size <= most:
        if serving.requests_per_second(2 * size) < _WORTHWHILE * serving.requests_per_second(size):
            return size
        size *= 2
    return most
