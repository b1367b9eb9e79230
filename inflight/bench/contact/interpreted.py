"""The engine's CUDA path on a CPU: kernels by Triton's interpreter, and what graphs would replay computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from inflight.bench.contact.engines import Rerun
from inflight.engine import model_runner
from inflight.engine.attention.paged import KvTensors
from inflight.engine.cuda.elementwise import fuse_elementwise
from inflight.engine.cuda.forward import CudaForward
from inflight.engine.cuda.graphs import DecodeGraphs
from inflight.engine.model_runner import ModelRunner
from inflight.engine.models.decoder import DecoderModel

CPU = torch.device("cpu")


class InterpretedForward(CudaForward):
    """Runs a model's steps by the interpreter."""

    @torch.inference_mode()
    def capture(self, max_batch_size: int, max_length: int) -> None:
        """Stand for captured steps."""
        blocks = -(-max_length // self._block_size)
        self.graphs = DecodeGraphs(self.run, max_batch_size, blocks, self._block_size, CPU, Rerun)


def forward(model: DecoderModel, tensors: KvTensors, block_size: int, *_: Any, **__: Any) -> CudaForward:
    """Put the kernels into a model that is on a CPU, and return what runs its steps."""
    fuse_elementwise(model)
    return InterpretedForward(model, tensors, block_size)


@contextmanager
def interpreted() -> Iterator[None]:
    """Have engines that are made in here take the CUDA path."""
    with (
        mock.patch.object(model_runner, "cuda_forward", forward),
        mock.patch.object(model_runner, "pack_linears"),
        mock.patch.object(ModelRunner, "overlaps", True),
    ):
        yield
