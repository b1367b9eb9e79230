"""What a model needs on a GPU before it runs: weights as products take them, kernels of our own, and settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from inflight.engine.device import BFLOAT16, FP8, has_compiler
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.adapted.model import AdaptedModel
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.limits import check_invariant, unknown_to_gpu_kernels
from inflight.engine.models.served import ServedModel
from inflight.engine.quant.convert import decode_latent_weights
from inflight.engine.quant.decoding import decode_once
from inflight.errors import DeploymentError

if TYPE_CHECKING:
    from inflight.engine.cuda.forward import CudaForward

log = logging.getLogger(__name__)

INVARIANT_ON = (9, 0)
"""The compute capability on which ``engine.batch_invariant`` has been shown to hold."""


def prepare_weights(
    model: ServedModel, device: torch.device, reserved: Callable[[int], int], batch_invariant: bool = False
) -> None:
    """Hold the quantized weights of a loaded model as a GPU's products take them; elsewhere, leave them as they are.

    FP8 products take them as they are; weights of other schemes are decoded once if there is memory for it. That is
    settled, and the memory taken, before a draft model and the KV cache get what is left.

    ``reserved`` returns how many of the bytes that are free now must be left for what comes later, beside the steps.
    ``batch_invariant``: take no FP8 products, and none of cuBLAS's: how those add up may depend on the number of rows.

    Raises:
        DeploymentError: ``batch_invariant`` is asked for, and there is no memory to decode the weights.
    """
    if device.type != "cuda" or isinstance(model, AdaptedModel):
        return
    _prepare_quantized(model, device, reserved, batch_invariant)
    if batch_invariant:
        from inflight.engine.cuda.invariant import use_invariant_products

        log.info("%d linears use products that do not depend on the number of rows", use_invariant_products(model))


def _prepare_quantized(
    model: DecoderModel, device: torch.device, reserved: Callable[[int], int], batch_invariant: bool
) -> None:
    dtype = model.dtype
    decode_latent_weights(model, dtype)
    capable = has_compiler() and torch.cuda.get_device_capability(device) >= FP8
    if capable and dtype == torch.bfloat16 and not batch_invariant:
        from inflight.engine.cuda.fp8 import use_scaled_mm

        if products := use_scaled_mm(model):
            log.info("%d products are FP8", products)
    decode_once(model, dtype, device, reserved, joined=True, required=batch_invariant)


def cuda_forward(
    model: ServedModel, kv_pool: KvPool, block_size: int, max_batch_size: int, max_length: int,
    one_tile: bool = False,
) -> CudaForward | None:  # fmt: skip
    """Put the kernels into a loaded model and return what runs its steps; None: PyTorch alone runs them here.

    Arguments are those of ``CudaForward``.

    Raises:
        DeploymentError: ``one_tile`` asks for kernels that cannot run here.
    """
    device = kv_pool.device
    if device.type != "cuda":
        return None
    missing = _missing(model, kv_pool)
    if missing is None and isinstance(model, DecoderModel):
        from inflight.engine.cuda.forward import CudaForward
        from inflight.engine.cuda.layers import fuse_layers

        fuse_layers(model, one_tile)
        log.info("kernels run attention and what lies between matrix products")
        return CudaForward(model, kv_pool, block_size, max_batch_size, max_length, one_tile)
    if one_tile:
        raise DeploymentError(f"engine.batch_invariant needs the kernels: {missing}")
    told = log.info if isinstance(model, AdaptedModel) else log.warning
    told("%s: attention runs without kernels, and decode steps without graphs", missing)
    return None


def _missing(model: ServedModel, kv_pool: KvPool) -> str | None:
    """Return what the kernels lack for a loaded model and a cache, and None where they lack nothing."""
    if not isinstance(model, DecoderModel):
        return "transformers' code computes the model"
    if not has_compiler():
        return "Triton's compiler is not installed"
    capability = torch.cuda.get_device_capability(kv_pool.device)
    if capability < (FP8 if kv_pool.stored == torch.float8_e4m3fn else BFLOAT16):
        return "compute capability {}.{}".format(*capability)
    if unknown := unknown_to_gpu_kernels(model.config):
        return f"the kernels have no {', no '.join(unknown)}"
    from inflight.engine.cuda.experts import takes

    if takes(model):
        return None
    return (
        "the experts' weights stay quantized, or their inputs are rounded, and the kernels multiply only decoded "
        "weights by inputs as they are"
    )


def require_invariance(device: torch.device, candidates: int, model: ModelConfig) -> None:
    """Require what ``engine.batch_invariant`` needs on a GPU.

    Args:
        device: the GPU.
        candidates: ``speculation.candidates``; more than one make trees of guesses, which no kernel attends to.
        model: the model's shape, all of which kernels must compute.

    Raises:
        DeploymentError: it would not hold on this device, or nobody has shown it.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability != INVARIANT_ON:
        raise DeploymentError(
            "engine.batch_invariant holds on GPUs of compute capability {}.{}; {} has {}.{}".format(
                *INVARIANT_ON, device, *capability
            )
        )
    if candidates > 1:
        raise DeploymentError(
            f"speculation.candidates is {candidates}; with engine.batch_invariant on a GPU it must be 1: trees of "
            "guesses are attended to in another order"
        )
    if not has_compiler():
        raise DeploymentError("engine.batch_invariant needs Triton's compiler, for its own products and attention")
    check_invariant(model)
