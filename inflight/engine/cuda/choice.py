"""Whether a model's steps run by kernels of our own. They need Triton, which PyTorch's CPU builds come without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from inflight.engine.attention.paged import KvTensors
from inflight.engine.cuda.capability import BFLOAT16, FP8
from inflight.engine.cuda.compiler import has_compiler
from inflight.engine.device_memory import free_memory
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.quant.decoded import Decoding, decode_weights

if TYPE_CHECKING:
    from inflight.engine.cuda.forward import CudaForward

log = logging.getLogger(__name__)

_WITHOUT = "attention runs without kernels, and decode steps without graphs"
_RESERVE = 1 << 30
"""Bytes that decoding a weight takes for a moment, and that steps take, at the least."""


def prepare_weights(
    model: DecoderModel, device: torch.device, reserved: Callable[[int], int], batch_invariant: bool = False
) -> None:
    """Hold the quantized weights of a loaded model as a GPU's products take them; elsewhere, leave them as they are.

    FP8 products take them as they are; weights of other schemes are decoded once if there is memory for it. That is
    settled, and the memory taken, before a draft model and the KV cache get what is left.

    Args:
        model: with its weights.
        device: where they are.
        reserved: returns how many of the bytes that are free now must be left for what comes later, beside the steps.
        batch_invariant: take no FP8 products: how those add up may depend on the number of rows.
    """
    dtype = model.model.norm.weight.dtype
    if device.type != "cuda":
        return
    if (
        not batch_invariant
        and has_compiler()
        and torch.cuda.get_device_capability(device) >= FP8
        and dtype == torch.bfloat16
    ):
        from inflight.engine.cuda.fp8 import use_scaled_mm

        if products := use_scaled_mm(model):
            log.info("%d products are FP8", products)
    needed, free = Decoding.of(model, dtype), free_memory(device)
    if not needed.linears:
        return
    more = needed.decoded - needed.packed
    rest = reserved(free) + _RESERVE
    told = (needed.linears, more / 2**20, free / 2**20, rest / 2**20)
    if more + rest > free:
        log.warning(
            "the weights of %d linears are decoded in each step, which takes several times as long: decoded once they "
            "would take %.1f MiB more; %.1f MiB are free, and the KV cache, steps and a draft model need %.1f MiB",
            *told,
        )  # fmt: skip
        return
    decode_weights(model, dtype)
    log.info(
        "the weights of %d linears are decoded once, and take %.1f MiB more; %.1f MiB were free, and the KV cache, "
        "steps and a draft model need %.1f MiB", *told,
    )  # fmt: skip


def cuda_forward(
    model: DecoderModel, tensors: KvTensors, block_size: int, max_batch_size: int, max_length: int,
    one_tile: bool = False,
) -> CudaForward | None:  # fmt: skip
    """Put the kernels into a loaded model and return what runs its steps; None: PyTorch alone runs them here.

    Arguments are those of ``CudaForward``.
    """
    device = tensors.keys.device
    if device.type != "cuda":
        return None
    if not has_compiler():
        log.warning("Triton's compiler is not installed: %s", _WITHOUT)
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < (FP8 if tensors.keys.dtype == torch.float8_e4m3fn else BFLOAT16):
        log.warning("compute capability %d.%d: %s", *capability, _WITHOUT)
        return None
    from inflight.engine.cuda.forward import CudaForward
    from inflight.engine.cuda.layers import fuse_layers

    fuse_layers(model)
    log.info("kernels run attention and what lies between matrix products")
    return CudaForward(model, tensors, block_size, max_batch_size, max_length, one_tile)
