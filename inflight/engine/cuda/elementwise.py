"""What lies between a model's matrix products, each in one pass over memory: norms, rotations, gates.

PyTorch computes these in several kernels each, and in a decode step of few tokens most of the time would go into
launching them. Sums and products are float32 and are rounded once; ``models.layers`` is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from inflight.engine.models.layers import Attention, GatedMlp, GemmaRmsNorm, RmsNorm

_BLOCK = 1024


class FusedRmsNorm(nn.Module):
    """``layers.RmsNorm``, or Gemma's, in one kernel."""

    def __init__(self, norm: RmsNorm) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.eps
        self._offset = isinstance(norm, GemmaRmsNorm)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x [tokens, ..., size]``."""
        heads = x if x.dim() == 3 else x[:, None]
        tokens, count, size = heads.shape
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _rms_norm_kernel[(tokens * count,)](
            heads, self.weight, out, count, *heads.stride()[:2], self._eps,
            SIZE=size, WIDTH=triton.next_power_of_2(size), OFFSET=self._offset,
        )  # fmt: skip
        return out


def fuse_elementwise(model: nn.Module) -> None:
    """Put the kernels into a model: its norms, its rotations and its gates."""
    for name, module in list(model.named_modules()):
        if isinstance(module, RmsNorm):
            model.set_submodule(name, FusedRmsNorm(module))
        elif isinstance(module, Attention):
            module.rotate = rotate
        elif isinstance(module, GatedMlp):
            module.gate = gate


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads ``x [tokens, heads, head_dim]``: ``models.rope.rotate``."""
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate_kernel[(tokens, heads)](
        x, cos, sin, out, *x.stride()[:2], cos.stride(0), SIZE=size, TURNED=cos.shape[-1],
        WIDTH=triton.next_power_of_2(size),
    )  # fmt: skip
    return out


def gate(x: Tensor, gelu: bool) -> Tensor:
    """Return the activation of the first half of ``x [tokens, 2 * inner]`` times the second: ``layers.gated``."""
    tokens, inner = len(x), x.shape[-1] // 2
    out = torch.empty((tokens, inner), dtype=x.dtype, device=x.device)
    _gate_kernel[(tokens, triton.cdiv(inner, _BLOCK))](x, out, x.stride(0), inner, GELU=gelu, BLOCK=_BLOCK)
    return out


@triton.jit
def _rms_norm_kernel(
    x, weight, out, count, token_stride, head_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, WIDTH)
    inside = dims < SIZE
    place = row // count * token_stride + row % count * head_stride + dims
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + dims, mask=inside, other=0.0)
    normal = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    result = normal * (1.0 + gain.to(tl.float32)) if OFFSET else normal.to(gain.dtype).to(tl.float32) * gain
    tl.store(out + row * SIZE + dims, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, token_stride, head_stride, angle_stride,
    SIZE: tl.constexpr, TURNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    inside, turned = dims < SIZE, dims < TURNED
    row = x + token * token_stride + head * head_stride
    value = tl.load(row + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.where(dims < TURNED // 2, dims + TURNED // 2, dims - TURNED // 2)
    partner = tl.load(row + other, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + token * angle_stride + dims, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * angle_stride + dims, mask=turned, other=0.0).to(tl.float32)
    result = value * c + partner * s
    place = (token * tl.num_programs(1) + head) * SIZE + dims
    tl.store(out + place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(x, out, token_stride, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < inner
    value = tl.load(x + token * token_stride + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * token_stride + inner + dims, mask=inside, other=0.0).to(tl.float32)
    # tanh(y) is 2 sigmoid(2 y) - 1: both activations are the value times a sigmoid.
    slope = 1.5957691216057308 * (value + 0.044715 * value * value * value) if GELU else value
    tl.store(out + token * inner + dims, (value * tl.sigmoid(slope) * up).to(out.dtype.element_ty), mask=inside)
