"""Shapes of public models, as their ``config.json`` has them."""

from __future__ import annotations

import json
from pathlib import Path

from inflight.engine.models.config import ModelConfig
from inflight.engine.models.reading import read_model_config
from inflight.engine.native.bindings import Packed
from inflight.export.plan.gpus import Gpu, cpu_gpu
from inflight.export.plan.native_speed import AttentionSpeed, NativeSpeed

SHAPES = Path(__file__).parents[1] / "shapes"
GIB = 2**30
_GB_S = {1: 40.0, 4: 36.0, 8: 20.0, 32: 6.0}
_ATTENTION = AttentionSpeed(read_gb_s=10.0, tflops=0.1)
NATIVE = NativeSpeed(
    instruction_set="avx2",
    threads=2,
    weights={packed.name: _GB_S for packed in Packed},
    attention=dict.fromkeys(("float32", "bf16", "fp8"), _ATTENTION),
)
"""A native step that multiplies all kinds of weights at one rate."""


def cpu(memory_mib: float = 80_000, native: NativeSpeed | None = NATIVE) -> Gpu:
    """Return a machine with a processor of these speeds; ``native``: None, where PyTorch computes."""
    return cpu_gpu(memory_mib, 20, {"float32": 0.1, "fp16": 0.1}, native)


def shape(name: str) -> ModelConfig:
    """Return the configuration in ``shapes/<name>``."""
    return read_model_config(json.loads((SHAPES / name / "config.json").read_text()))
