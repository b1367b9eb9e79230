"""Which precision takes which of TensorRT-LLM's two flows, and what upstream's tools call it.

The PyTorch flow serves a Hugging Face checkpoint as it is: the plain one, or one that Model Optimizer has quantized.
The TensorRT flow compiles an engine, from the plain checkpoint always: upstream's own scripts quantize on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inflight.errors import DeploymentError, nearest
from inflight.machine import ComputeCapability
from inflight.manifest import require_precision

Flow = Literal["pytorch", "tensorrt"]


@dataclass(frozen=True)
class Precision:
    """One precision of the weights."""

    flows: tuple[Flow, ...]
    """Those that serve it, the first by default."""
    dtype: Literal["auto", "bfloat16", "float16"] = "auto"
    """Of what is not quantized."""
    qformat: str = "full_prec"
    """What quantize.py calls it."""
    gemm_plugin: str = "auto"


PRECISIONS: dict[str, Precision] = {
    "bf16": Precision(("pytorch", "tensorrt"), dtype="bfloat16"),
    "fp16": Precision(("pytorch", "tensorrt"), dtype="float16"),
    "fp8": Precision(("pytorch", "tensorrt"), qformat="fp8", gemm_plugin="fp8"),
    # SmoothQuant has kernels in TensorRT engines only.
    "int8": Precision(("tensorrt",), qformat="int8_sq"),
    "int4-awq": Precision(("pytorch", "tensorrt"), qformat="int4_awq"),
    "w4a8-awq": Precision(("pytorch", "tensorrt"), qformat="w4a8_awq"),
    "nvfp4": Precision(("pytorch", "tensorrt"), qformat="nvfp4", gemm_plugin="nvfp4"),
}


def choose_flow(precision: str, compute_capability: ComputeCapability, wanted: Flow | None = None) -> Flow:
    """Return the flow for a precision on a GPU: the wanted one, or the first that serves it.

    Raises:
        DeploymentError: the precision is unknown, not in the wanted flow, or not in the chip.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise DeploymentError(
            f"precision {precision!r} is not one of TensorRT-LLM's: {known}{nearest(precision, PRECISIONS)}"
        )
    require_precision(precision, compute_capability)
    flows = PRECISIONS[precision].flows
    if wanted is not None and wanted not in flows:
        raise DeploymentError(f"precision {precision} is not served by the {wanted} flow; use the {flows[0]} flow")
    return wanted or flows[0]
