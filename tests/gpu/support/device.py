"""Where the tests of this folder run, and engines there: on a GPU; in a dry run on a CPU, kernels interpreted."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import Shape
from benchmarks.random_weights import RandomShards, write_config
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner

DRY = os.environ.get("GPU_TESTS") == "dry"
CPU = torch.device("cpu")
DEVICE = CPU if DRY else torch.device("cuda")
SHAPE = Shape("small", 1e6, 4096, 32, 64, 1, 2, 1) if DRY else Shape("small", 1e7, 4096, 512, 1024, 2, 8, 2)


def engine(shape: Shape = SHAPE, *, fp8: bool = False, plain: bool = False, **settings: Any) -> Engine:
    """Return a warm engine with random weights, the same on every device.

    Args:
        shape: of the model.
        fp8: whether its linears are in FP8.
        plain: on the CPU, in float32, without kernels.
        settings: of ``EngineConfig``.
    """
    from benchmarks.contact.interpreted import interpreted

    small = {"num_blocks": 512, "max_batch_size": 4, "max_tokens_per_step": 64, "prefix_reuse": False}
    where = {"device": "cpu" if plain else DEVICE.type, "dtype": "float32" if plain or DRY else "bfloat16"}
    if plain:
        where["cpu_step"] = "pytorch"
    with tempfile.TemporaryDirectory() as folder, interpreted() if DRY and not plain else nullcontext():
        config = EngineConfig(write_config(shape, Path(folder), fp8), **(small | where | settings))
        runner = ModelRunner(config, lambda _: RandomShards(shape, fp8, CPU))
        made = Engine(runner, tokenizer=None)
        made.warm_up()
    return made
