"""Whether a model's steps run by kernels of our own. They need Triton, which PyTorch's CPU builds come without."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import torch

from inflight.engine.attention.paged import KvTensors
from inflight.engine.models.decoder import DecoderModel

if TYPE_CHECKING:
    from inflight.engine.cuda.forward import CudaForward

log = logging.getLogger(__name__)

_WITHOUT = "attention runs without kernels, and decode steps without graphs"
_BFLOAT16 = (8, 0)
"""Compute capability from which on there is bfloat16."""
_FP8 = (8, 9)
"""Compute capability from which on there is FP8."""


def cuda_forward(
    model: DecoderModel, tensors: KvTensors, block_size: int, max_batch_size: int, max_length: int
) -> CudaForward | None:
    """Put the kernels into a loaded model and return what runs its steps; None: PyTorch alone runs them here.

    Arguments are those of ``CudaForward``.
    """
    device = tensors.keys.device
    if device.type != "cuda":
        return None
    if importlib.util.find_spec("triton") is None:
        log.warning("Triton's compiler is not installed: %s", _WITHOUT)
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (_FP8 if tensors.keys.dtype == torch.float8_e4m3fn else _BFLOAT16):
        log.warning("compute capability %d.%d: %s", *capability, _WITHOUT)
        return None
    from inflight.engine.cuda.forward import CudaForward
    from inflight.engine.cuda.fp8 import use_scaled_mm
    from inflight.engine.cuda.layers import fuse_layers

    products = use_scaled_mm(model) if capability >= _FP8 and model.model.norm.weight.dtype == torch.bfloat16 else 0
    fuse_layers(model)
    log.info("kernels run attention and what lies between matrix products; %d products are FP8", products)
    return CudaForward(model, tensors, block_size, max_batch_size, max_length)
