"""Plans: how to serve a model on a GPU, from its ``config.json`` and the GPU's datasheet alone.

    plan = make_plan(model_config, find_gpu("h100"), PlanRequest(precision="fp8"))

It knows shapes and rooflines; not how a checkpoint is quantized or an engine compiled.
"""

from __future__ import annotations

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError
from inflight.export.plan.candidate import Candidate
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.memory import group_weight_bytes
from inflight.export.plan.placement import MAX_GPUS, Parallel, Shape
from inflight.export.plan.precision import resolve_kv_cache, resolve_precision
from inflight.export.plan.request import PlanRequest
from inflight.export.plan.result import Plan, is_predicted
from inflight.export.plan.roofline import Efficiency

__all__ = ["Plan", "PlanRequest", "make_plan"]


def make_plan(model_config: ModelConfig, gpu: Gpu, request: PlanRequest, efficiency: Efficiency | None = None) -> Plan:
    """Plan a model on a GPU.

    Without a rate or objectives, the group is the smallest that fits. With them, it is the one that serves the rate
    with the fewest GPUs, or makes the most of each. Pipeline parallelism is for what tensor parallelism cannot hold.

    Args:
        model_config: of the checkpoint.
        gpu: the kind of GPU.
        request: precision, load and objectives.
        efficiency: from a calibration; None: assumed.

    Raises:
        DeploymentError: the chip cannot compute the precision, the model does not fit, or an objective cannot be met
            even by a request alone; the message says which.
    """
    request.check(model_config)
    shape = _shape(model_config, gpu, request)
    limit = 1 if gpu.is_cpu else min(request.gpus or MAX_GPUS, MAX_GPUS)
    sizes = _tensor_parallel_sizes(shape, request, limit)
    fitted = False
    for pipeline in range(1, min(limit, model_config.num_layers) + 1):
        groups = [Parallel(tensor, pipeline) for tensor in sizes if tensor * pipeline <= limit]
        candidates = [Candidate(shape, gpu, parallel, request, efficiency) for parallel in groups]
        fitting = [candidate for candidate in candidates if candidate.fits]
        fitted = fitted or bool(fitting)
        if not request.has_load:
            fitting = fitting[:1]
        plans = [plan for plan in (candidate.plan() for candidate in fitting) if plan is not None]
        if plans:
            return min(plans, key=_merit)
    raise DeploymentError(_why_not(shape, gpu, request, limit, fitted))


def _shape(config: ModelConfig, gpu: Gpu, request: PlanRequest) -> Shape:
    precision = resolve_precision(request.precision, gpu, config.dtype)
    kv_cache, kv_bytes = resolve_kv_cache(request.kv_cache, gpu, precision)
    if request.excluded and not precision.quantized:
        raise DeploymentError(f"exclude: precision {precision.name} quantizes nothing")
    if request.free_windows and gpu.is_cpu:
        raise DeploymentError("free_windows: the portable engine keeps all blocks of a sequence; leave it out for cpu")
    if request.has_load and not is_predicted(gpu, precision.name, kv_cache):
        raise DeploymentError(
            f"{gpu.name}: the speed of {precision.name} with a {kv_cache} KV cache is not predicted, so no rate or "
            "objective can be planned for; leave them out"
        )
    return Shape(config, precision, kv_cache, kv_bytes, request.excluded, request.free_windows)


def _tensor_parallel_sizes(shape: Shape, request: PlanRequest, limit: int) -> list[int]:
    known, wanted = shape.tensor_parallel_sizes(limit), request.tensor_parallel_size
    if wanted is None:
        return known
    if wanted not in known:
        raise DeploymentError(
            f"tensor_parallel_size is {wanted}; this model in {shape.precision.name} on up to {limit} GPUs can be "
            f"shared by {', '.join(map(str, known))}"
        )
    return [wanted]


def _merit(plan: Plan) -> tuple[bool, float, int]:
    """What makes a plan better than another, smallest first: it holds the rate, with the fewest GPUs; without a rate,
    it makes more of each GPU."""
    size = plan.tensor_parallel_size * plan.pipeline_parallel_size
    cost = plan.fleet.gpus if plan.request.rate is not None else -plan.capacity.tokens_per_second / size
    return plan.fleet.saturated, cost, size


def _why_not(shape: Shape, gpu: Gpu, request: PlanRequest, limit: int, fitted: bool) -> str:
    if fitted:
        return (
            f"{gpu.name}: no group of up to {limit} GPUs meets the objectives, not even for one request alone "
            f"(TTFT {request.slo_ttft_ms or 'any'} ms, ITL {request.slo_itl_ms or 'any'} ms)"
        )
    needed = group_weight_bytes(shape.stages(Parallel()), Parallel())
    return (
        f"{gpu.name}: {needed / 2**30:.1f} GiB of weights and one sequence of {request.longest} tokens do not fit into "
        f"{limit} GPU{'s' * (limit > 1)} of {gpu.memory_bytes / 2**30:.1f} GiB; use a smaller precision or more GPUs"
    )
