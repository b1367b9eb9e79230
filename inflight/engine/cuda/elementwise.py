"""What lies between a model's matrix products, each in one pass over memory: norms with the sums before them, gates.

PyTorch computes these in several kernels each, and in a decode step of few tokens most of the time would go into
launching them. Sums and products are float32 and are rounded where ``models.layers``, the reference, rounds. What a
product wants in FP8 is quantized on the way (``fp8``). Rotations go with storing keys and values: ``attention.store``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from inflight.engine.attention.store import form_of, gained, quantized
from inflight.engine.models.layers import RmsNorm

_BLOCK = 1024


class Residual(NamedTuple):
    """The residual stream between two layers, whose last sum the next norm adds up."""

    x: Tensor
    """``[tokens, size]``, contiguous; the next norm overwrites it with the sum."""
    delta: Tensor | None
    """What is to be added to it, like ``x``; None: nothing."""
    gain: Tensor | None
    """The weight of the norm that ``delta`` goes through first; None: through none."""


class FusedRmsNorm(nn.Module):
    """``layers.RmsNorm``, of any form, with the residual's sum before it and the rounding to FP8 behind it."""

    def __init__(self, norm: RmsNorm, scale: Tensor | None = None) -> None:
        """``scale``: of the FP8 product that takes the result; None: it takes the result as it is."""
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.form = form_of(norm)
        self._scale = scale

    def forward(self, x: Tensor | Residual) -> Tensor:
        """Normalize ``x [tokens, size]``, contiguous, or a residual's sum, which is left where the residual was."""
        total, delta, gain = x if isinstance(x, Residual) else Residual(x, None, None)
        out = torch.empty_like(total, dtype=total.dtype if self._scale is None else torch.float8_e4m3fn)
        _add_rms_norm(Residual(total, delta, gain), self.weight, out, self._scale, self.eps, self.form)
        return out


class FusedSum(nn.Module):
    """In place of a norm where there is none: the residual's sum, and the rounding to FP8 behind it."""

    def __init__(self, behind: RmsNorm, scale: Tensor | None = None) -> None:
        """``behind``: a norm like those that a residual's ``gain`` belongs to; ``scale``: as in ``FusedRmsNorm``."""
        super().__init__()
        self._eps, self._form, self._scale = behind.eps, form_of(behind), scale

    def forward(self, x: Tensor | Residual) -> Tensor:
        """Return ``x [tokens, size]``, contiguous, or a residual's sum, which is left where the residual was."""
        total = x if isinstance(x, Residual) else Residual(x, None, None)
        if self._scale is None and total.delta is None:
            return total.x
        out = None if self._scale is None else torch.empty_like(total.x, dtype=torch.float8_e4m3fn)
        _add_rms_norm(total, None, out, self._scale, self._eps, self._form)
        return total.x if out is None else out


def _add_rms_norm(
    total: Residual, weight: Tensor | None, out: Tensor | None, scale: Tensor | None, eps: float, form: int
) -> None:  # fmt: skip
    """Launch the kernel, whose arguments these are."""
    tokens, size = total.x.shape
    width = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(tokens,)](
        total.x, total.delta, total.gain, weight, out, scale, eps,
        SIZE=size, WIDTH=width, FORM=form, num_warps=min(16, max(1, width // 512)),
    )  # fmt: skip


def gate(x: Tensor, gelu: bool, scale: Tensor | None = None) -> Tensor:
    """Return the activation of the first half of ``x [tokens, 2 * inner]`` times the second: ``layers.gated``.

    ``scale``: as in ``FusedRmsNorm``.
    """
    tokens, inner = len(x), x.shape[-1] // 2
    out = torch.empty((tokens, inner), dtype=x.dtype if scale is None else torch.float8_e4m3fn, device=x.device)
    _gate_kernel[(tokens, triton.cdiv(inner, _BLOCK))](x, out, scale, x.stride(0), inner, GELU=gelu, BLOCK=_BLOCK)
    return out


@triton.jit
def _rounded(x, scale, kind: tl.constexpr, stored: tl.constexpr):
    """Return ``x`` as the model's type rounds it, and as the next product wants it."""
    return x.to(kind) if scale is None else quantized(x.to(kind), tl.load(scale), stored)


@triton.jit
def _add_rms_norm_kernel(
    x, delta, delta_gain, weight, out, scale, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Normalize a row, or its sum with a row of ``delta``, which is left in ``x``.

    With a ``delta_gain``, ``delta`` goes through a norm of that weight first. Without a ``weight`` the sum is not
    normalized, and where it is all that is wanted ``out`` is None.
    """
    dims = tl.arange(0, WIDTH)
    inside = dims < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + dims
    kind: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        more = tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        if delta_gain is not None:
            gain = tl.load(delta_gain + dims, mask=inside, other=0.0)
            mean = tl.div_rn(tl.sum(more * more, 0), 1.0 * SIZE)
            more = gained(more * tl.rsqrt(mean + eps), gain, FORM).to(kind).to(tl.float32)
        total = (value + more).to(kind)
        tl.store(x + place, total, mask=inside)
        value = total.to(tl.float32)
    if weight is not None:
        gain = tl.load(weight + dims, mask=inside, other=0.0)
        mean = tl.div_rn(tl.sum(value * value, 0), 1.0 * SIZE)
        value = gained(value * tl.rsqrt(mean + eps), gain, FORM)
    if out is not None:
        tl.store(out + place, _rounded(value, scale, kind, out.dtype.element_ty), mask=inside)


@triton.jit
def activated(gate, up, GELU: tl.constexpr, CLAMP: tl.constexpr, SLOPE: tl.constexpr):
    """Return the activation of ``gate`` times ``up``, float32, as ``layers.Activation``; ``CLAMP`` 0: there is none."""
    if CLAMP > 0:
        gate = tl.minimum(gate, CLAMP, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -CLAMP, CLAMP, propagate_nan=tl.PropagateNan.ALL) + 1.0
        slope = gate * SLOPE
    else:
        # tanh(y) is 2 sigmoid(2 y) - 1: both activations are the value times a sigmoid.
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    return gate * tl.sigmoid(slope) * up


@triton.jit
def _gate_kernel(x, out, scale, token_stride, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    token, dims = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < inner
    value = tl.load(x + token * token_stride + dims, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * token_stride + inner + dims, mask=inside, other=0.0).to(tl.float32)
    result = activated(value, up, GELU, 0.0, 1.0)
    place = out + token * inner + dims
    tl.store(place, _rounded(result, scale, x.dtype.element_ty, out.dtype.element_ty), mask=inside)
