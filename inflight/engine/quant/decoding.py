"""Decides whether quantized weights are decoded once, at the start, or for each call: the memory's room decides."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from inflight.engine.device import free_memory
from inflight.engine.models.experts import MoeBlock
from inflight.engine.models.layers import each_of
from inflight.engine.quant.convert import decode_weights, decoding_cost
from inflight.engine.quant.linears import QuantizedLinear
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

_RESERVE = 1 << 30
"""Bytes that decoding a weight takes for a moment, and that steps take, at the least."""


def decode_once(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    reserved: Callable[[int], int],
    *,
    joined: bool,
    required: bool = False,
) -> None:
    """Decode the quantized weights of a loaded model if there is memory for it; log what was decided, and why.

    Args:
        model: whose linears are replaced.
        dtype: of the computation.
        device: whose memory counts.
        reserved: returns how many of the bytes that are free now must be left for what comes later, beside the steps.
        joined: as for ``decode_weights``.
        required: ``engine.batch_invariant`` cannot do without it.

    Raises:
        DeploymentError: it is ``required``, and there is no memory for it.
    """
    (linears, more), free = decoding_cost(model, dtype, joined), free_memory(device)
    if not linears:
        return
    rest = reserved(free) + _RESERVE + (_of_experts(model, dtype) if joined else 0)
    told = (linears, more / 2**20, free / 2**20, rest / 2**20)
    if more + rest > free and required:
        raise DeploymentError(
            "engine.batch_invariant needs the weights of {} linears decoded, which take {:.1f} MiB more; {:.1f} MiB "
            "are free, and the KV cache, steps and a draft model need {:.1f} MiB: lower kv_cache.memory_fraction or "
            "kv_cache.tokens, or serve the checkpoint that is not quantized".format(*told)
        )
    if more + rest > free:
        log.warning(
            "the weights of %d linears are decoded in each step, which takes several times as long: decoded once they "
            "would take %.1f MiB more; %.1f MiB are free, and the KV cache, steps and a draft model need %.1f MiB",
            *told,
        )  # fmt: skip
        return
    decode_weights(model, dtype, joined)
    log.info(
        "the weights of %d linears are decoded once, and take %.1f MiB more; %.1f MiB were free, and the KV cache, "
        "steps and a draft model need %.1f MiB", *told,
    )  # fmt: skip


def _of_experts(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the decoded experts of one layer, which are twice there when they become one tensor."""
    blocks = (block.experts.modules() for _, block in each_of(model, MoeBlock))
    linears = ([one for one in modules if isinstance(one, QuantizedLinear)] for modules in blocks)
    sizes = (sum(one.elements for one in own) for own in linears)
    return max(sizes, default=0) * dtype.itemsize
