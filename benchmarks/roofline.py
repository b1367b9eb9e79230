"""How much of the time is what the weights' products take at the machine's own speed: the rest is what can be won.

After S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009; here with one roof, arithmetic in float32.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.checkpoints import Shape
from inflight.engine.models.packed import pack_linears

_ROWS, _SIZE = 512, 2048
_TRIES = 12


@torch.inference_mode()
def peak_flops(device: str) -> float:
    """Return the FLOP/s of a large product in float32, packed as the engine's are: the best of several.

    It runs on as many threads as PyTorch has now.
    """
    model = nn.Sequential(nn.Linear(_SIZE, _SIZE, bias=False, device=device))
    pack_linears(model)
    x = torch.randn(_ROWS, _SIZE, device=device)
    return 2 * _ROWS * _SIZE**2 / min(_seconds(model, x) for _ in range(_TRIES))


def _seconds(model: nn.Module, x: torch.Tensor) -> float:
    begun = time.perf_counter()
    model(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def flops_per_token(shape: Shape, logits: float) -> float:
    """Return the floating-point operations of a token's products with weights; attention is not among them.

    Args:
        shape: of the model.
        logits: rows of logits that are computed per token: 1 in decode, in prefill one for a whole prompt.
    """
    kv = shape.hidden // shape.heads * shape.kv_heads
    layer = 2 * shape.hidden * (shape.hidden + kv) + 3 * shape.hidden * shape.intermediate
    return 2 * (shape.layers * layer + logits * shape.vocab * shape.hidden)
