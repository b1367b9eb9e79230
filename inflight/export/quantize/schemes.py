"""The precisions that a checkpoint can be quantized to, and what NVIDIA ModelOpt calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """One way to hold weights and activations."""

    modelopt_config: str
    """Name of the configuration in ``modelopt.torch.quantization``."""
    algorithm: str
    """``quant_algo`` in the checkpoint, which TensorRT-LLM reads too."""
    meaning: str


SCHEMES = {
    "fp8": Scheme("FP8_DEFAULT_CFG", "FP8", "weights and activations in FP8 (E4M3), a scale per tensor"),
    "int8": Scheme(
        "INT8_SMOOTHQUANT_CFG",
        "W8A8_SQ_PER_CHANNEL",
        "weights in INT8 with a scale per row, activations in INT8, smoothed (SmoothQuant)",
    ),
    "int4-awq": Scheme(
        "INT4_AWQ_CFG", "W4A16_AWQ", "weights in INT4 with a scale per 128 inputs (AWQ), activations in 16 bit"
    ),
    "w4a8-awq": Scheme("W4A8_AWQ_BETA_CFG", "W4A8_AWQ", "weights in INT4 (AWQ), activations in FP8"),
    "nvfp4": Scheme("NVFP4_DEFAULT_CFG", "NVFP4", "weights and activations in FP4 with an FP8 scale per 16 values"),
}
"""By precision; ``bf16``, ``fp16`` and ``float32`` keep the checkpoint as it is."""
