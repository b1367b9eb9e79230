"""What computes a model on a chip, as far as a plan depends on it: how fast that is, and what nobody can predict."""

from __future__ import annotations

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.limits import why_not_native
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.precision import Precision
from inflight.export.plan.roofline import AS_MEASURED, ASSUMED_GPU, ASSUMED_PYTORCH, Efficiency
from inflight.trtllm.models import why_unlisted


def by_portable_engine_alone(config: ModelConfig, gpu: Gpu, precision: Precision) -> bool:
    """Return whether only the portable engine serves a model on a chip. It runs on one; layers are not shared."""
    if gpu.is_cpu or not precision.by_tensorrt_llm:
        return True
    return why_unlisted(config) is not None or config.modeling == "transformers"


def assumed_efficiency(config: ModelConfig, gpu: Gpu, precision: Precision) -> Efficiency:
    """Return the efficiencies of what computes a model, until a measurement says better."""
    if not gpu.is_cpu:
        return ASSUMED_GPU
    return AS_MEASURED if by_native_step(config, gpu, precision) else ASSUMED_PYTORCH


def why_unpredicted(config: ModelConfig, gpu: Gpu, precision: Precision, kv_cache: str) -> str | None:
    """Return why no roofline describes how a model is computed; None: one does."""
    if gpu.is_cpu:
        if by_native_step(config, gpu, precision) or not (precision.quantized or _rounds(kv_cache, precision)):
            return None
        return (
            "PyTorch computes this model's steps, which decodes quantized weights for each call and adds up in float64 "
            "where it rounds inputs or the KV cache, several times slower than bf16"
        )
    if config.modeling == "transformers":
        return "transformers' code computes this model, on a GPU without kernels and graphs, which nobody has measured"
    if (unlisted := why_unlisted(config)) is not None:
        return f"{unlisted}, and no roofline describes the portable engine on a GPU"
    if not precision.by_tensorrt_llm:
        return (
            f"on a GPU the portable engine decodes weights in {precision.name} once, where there is room for them, and "
            "no roofline describes that"
        )
    return None


def _rounds(kv_cache: str, precision: Precision) -> bool:
    """Return whether the KV cache holds less than is computed with."""
    return kv_cache == "fp8" or (kv_cache == "bf16" and precision.base == 4)


def by_native_step(config: ModelConfig, gpu: Gpu, precision: Precision) -> bool:
    """Return whether the native step computes a model on a chip; on a CPU, PyTorch does otherwise."""
    return gpu.native is not None and why_not_native(config) is None and precision.packed is not None
