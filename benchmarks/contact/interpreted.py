"""The engine's CUDA path on a CPU: kernels by Triton's interpreter, and what graphs would replay computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from inflight.engine import model_runner, sizing
from inflight.engine.cuda.forward import CudaForward, DecodeGraphs
from inflight.engine.cuda.layers import fuse_layers
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.decoder import DecoderModel

_WARM_UP_TOKENS = 2
"""One step that prefills and one that decodes: each takes the interpreter a while."""


class InterpretedForward(CudaForward):
    """Runs a model's steps by the interpreter."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Stand for captured steps."""
        self.graphs = DecodeGraphs(self.run, self.tables, lambda compute: compute)


def forward(model: DecoderModel, kv_pool: KvPool, *sizes: Any) -> CudaForward:
    """Put the kernels into a model that is on a CPU, and return what runs its steps; as ``prepare.cuda_forward``."""
    fuse_layers(model)
    return InterpretedForward(model, kv_pool, *sizes)


@contextmanager
def interpreted() -> Iterator[None]:
    """Have engines that are made in here take the CUDA path."""
    with (
        mock.patch.object(model_runner, "cuda_forward", forward),
        mock.patch.object(model_runner, "native_model", return_value=None),
        mock.patch.object(model_runner, "pack_linears"),
        mock.patch.object(ModelRunner, "overlaps", True),
        mock.patch.object(sizing, "_WARM_UP_TOKENS", _WARM_UP_TOKENS),
    ):
        yield
