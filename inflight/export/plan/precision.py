"""Precisions: how many bytes a weight takes, what its products are computed in, and which chips can do that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from inflight.engine.native.bindings import Packed
from inflight.errors import DeploymentError, nearest
from inflight.export.plan.gpus import Arithmetic, Gpu
from inflight.manifest import MINIMUM_COMPUTE_CAPABILITY, dotted


@dataclass(frozen=True)
class Precision:
    """One way to hold the weights of a model's linear layers. Sizes are in bytes."""

    name: str
    weight: float
    """The size of a weight in a linear layer."""
    arithmetic: Arithmetic
    """What its products are computed in."""
    base: int = 2
    """The size of a number that is not quantized: in embedding, norms, biases, lm_head, activations and KV cache."""
    group: int = 0
    """Weights of one row that share a scale; 0: none do."""
    shortest_group: int = 0
    """How few they may be where ``group`` does not divide a row."""
    group_scale: int = 0
    channel_scale: int = 0
    """The size of an output channel's scale."""
    input_scale: int = 0
    """The size of an input channel's scale, which AWQ moves from activations into weights."""
    tensor_scale: int = 0
    """The size of a layer's scales, those of its weights and of its activations."""
    fp8_kv_cache: bool = False
    """Whether ``kv_cache: auto`` means FP8: these are calibrated with activations anyway."""
    first_capability: tuple[int, int] = (7, 0)
    instead: str = ""
    """What to use on an older chip."""
    packed: Packed | None = None
    """What the native step on a CPU packs such weights as; None: PyTorch decodes them for each call."""
    by_tensorrt_llm: bool = True
    """Whether TensorRT-LLM multiplies such weights on a GPU; else the portable engine decodes them once."""

    @property
    def quantized(self) -> bool:
        """Whether it holds linear layers in another type than the rest."""
        return self.weight != self.base


_FP8 = MINIMUM_COMPUTE_CAPABILITY["fp8"]
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", 4, "float32", base=4, packed=Packed.FLOAT32),
        Precision("bf16", 2, "fp16", first_capability=(8, 0), instead="fp16", packed=Packed.BFLOAT16),
        Precision("fp16", 2, "fp16"),
        Precision(
            "fp8", 1, "fp8", tensor_scale=8, fp8_kv_cache=True, first_capability=_FP8, instead="int8 or int4-awq",
            packed=Packed.E4M3,
        ),
        # In TensorRT's engines a row has one scale of four bytes, which is less.
        Precision(
            "int8", 1, "fp16", group=64, shortest_group=16, group_scale=2, first_capability=(7, 5), instead="fp16",
            packed=Packed.INT8_COLUMNS,
        ),
        Precision(
            "int4-awq", 0.5, "fp16", group=128, shortest_group=32, group_scale=2, input_scale=2,
            first_capability=(8, 0), instead="int8", packed=Packed.INT4,
        ),
        Precision(
            "w4a8-awq", 0.5, "fp8", group=128, shortest_group=32, group_scale=2, input_scale=2, tensor_scale=8,
            fp8_kv_cache=True, first_capability=MINIMUM_COMPUTE_CAPABILITY["w4a8-awq"], instead="int4-awq",
            packed=Packed.E4M3,
        ),
        Precision(
            "nvfp4", 0.5, "nvfp4", group=16, shortest_group=16, group_scale=1, tensor_scale=8, fp8_kv_cache=True,
            first_capability=MINIMUM_COMPUTE_CAPABILITY["nvfp4"],
            instead=f"fp8 (from compute capability {dotted(_FP8)}) or int4-awq",
        ),
    )
}  # fmt: skip
KV_CACHES = ("auto", "bf16", "fp8")


def resolve_precision(name: str, gpu: Gpu, checkpoint_dtype: str) -> Precision:
    """Return the precision to plan for; ``auto`` is the checkpoint's own 16-bit type, and float32 on a CPU.

    Raises:
        DeploymentError: unknown, or the chip cannot compute it; what to use instead is named.
    """
    if name == "auto":
        name = "float32" if gpu.is_cpu else ("fp16" if checkpoint_dtype == "float16" else "bf16")
    precision = PRECISIONS.get(name)
    if precision is None:
        raise DeploymentError(
            f"precision {name!r} is unknown{nearest(name, PRECISIONS)}; known: auto, {', '.join(PRECISIONS)}"
        )
    if gpu.is_cpu:
        if name == "fp16":
            raise DeploymentError(
                "precision fp16: the portable engine on a CPU computes in bf16 or float32; use one of them"
            )
        return _on_cpu(precision, checkpoint_dtype) if precision.quantized else precision
    if name == "float32":
        raise DeploymentError(f"precision float32: it is for cpu; use bf16 or fp16 on {gpu.name}")
    require_capability(gpu, precision)
    return precision


def _on_cpu(precision: Precision, checkpoint_dtype: str) -> Precision:
    """Return a quantized precision as a CPU computes it.

    Numbers that are not quantized are bfloat16 if the checkpoint's are, else float32 (``engine.dtype: auto``). PyTorch,
    where it computes, adds up in float32.
    """
    return replace(precision, arithmetic="float32", base=2 if checkpoint_dtype == "bfloat16" else 4)


def require_capability(gpu: Gpu, precision: Precision) -> None:
    """Require that a GPU computes in a precision.

    Raises:
        DeploymentError: it cannot; what to use instead is named.
    """
    if gpu.capability < precision.first_capability or precision.arithmetic not in gpu.dense_tflops:
        raise DeploymentError(
            f"precision {precision.name}: {gpu.name} has compute capability {gpu.compute_capability}, and "
            f"{precision.name} begins with {dotted(precision.first_capability)}; use {precision.instead}"
        )


def resolve_kv_cache(name: str, gpu: Gpu, precision: Precision) -> tuple[str, int]:
    """Return the type of the KV cache and its bytes per number.

    Raises:
        DeploymentError: unknown, or the chip cannot do it; what to use instead is named.
    """
    if name not in KV_CACHES:
        raise DeploymentError(f"kv_cache {name!r} is unknown{nearest(name, KV_CACHES)}; known: {', '.join(KV_CACHES)}")
    if name == "fp8" and not gpu.is_cpu and gpu.capability < _FP8:
        raise DeploymentError(
            f"kv_cache fp8: {gpu.name} has compute capability {gpu.compute_capability}, and FP8 begins with "
            f"{dotted(_FP8)}; use bf16"
        )
    if name == "fp8" or (name == "auto" and precision.fp8_kv_cache):
        return "fp8", 1
    if precision.base == 4:  # whatever the scheme of its linears is called
        return ("bf16", 2) if name == "bf16" else ("float32", 4)
    return "fp16" if precision.name == "fp16" else "bf16", precision.base


@dataclass(frozen=True)
class StoredWeights:
    """How a checkpoint holds its weights that is quantized already; ``stored.read_stored`` makes it."""

    sizes: Mapping[str, int]
    """The bytes of each quantized linear, with scales and without bias, by the planner's name."""
    packed: Mapping[str, Packed | None]
    """What the native step packs each of them as; None: it does not multiply it."""
    precision: Precision
    """What follows for a plan; of its sizes only that of numbers which are not quantized counts."""

    def on(self, gpu: Gpu, checkpoint_dtype: str) -> StoredWeights:
        """Return the same as a chip computes it.

        Raises:
            DeploymentError: TensorRT-LLM multiplies such weights, and the chip cannot.
        """
        if gpu.is_cpu:
            return replace(self, precision=_on_cpu(self.precision, checkpoint_dtype))
        if self.precision.by_tensorrt_llm:
            require_capability(gpu, self.precision)
        return self
