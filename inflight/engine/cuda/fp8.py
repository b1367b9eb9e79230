"""FP8 matrix products on tensor cores, for linears that a checkpoint holds in FP8.

``torch._scaled_mm`` multiplies E4M3 by E4M3, adds up in float32 and applies both scales: what ``quant.linears``
computes by decoding, but for the order of summation. It wants the left matrix by rows, the right one by columns, and
sizes that are multiples of 16; what does not suit stays as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from inflight.engine.attention.store import quantized
from inflight.engine.quant.convert import products
from inflight.engine.quant.linears import Fp8Linear

FAST_ACCUMULATION = True
"""Whether tensor cores of compute capability 9.0 add up in their own registers throughout, which have some 14 bits,
rather than in float32 every few products, which is slower. It loses less than a sixth of what rounding inputs and
weights to E4M3 has lost before (``tests/engine/test_fp8_products.py`` emulates it)."""
_MULTIPLE = 16
_BLOCK = 1024


class ScaledMmLinear(nn.Module):
    """A linear, or several of one input and equal scales, as one FP8 product."""

    def __init__(self, parts: list[Fp8Linear]) -> None:
        """``parts``: linears that ``use_scaled_mm`` has found to suit."""
        super().__init__()
        bits = torch.cat([part.weight.view(torch.uint8) for part in parts])
        self.weight = nn.Parameter(bits.view(torch.float8_e4m3fn), requires_grad=False)
        self.input_scale, self.weight_scale = parts[0].input_scale, parts[0].weight_scale
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """Return bfloat16 ``[tokens, rows]`` of ``x [tokens, columns]``, in ``input_scale`` already or not yet."""
        return torch._scaled_mm(
            x if x.dtype == torch.float8_e4m3fn else quantize(x, self.input_scale),
            self.weight.t(),
            scale_a=self.input_scale,
            scale_b=self.weight_scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=FAST_ACCUMULATION,
        )


def use_scaled_mm(model: nn.Module) -> int:
    """Put FP8 products into a loaded model that computes in bfloat16, where they suit; return how many.

    Linears of one input suit if their scales are equal, they have no smoothing, and their sizes are multiples of 16.
    """
    count = 0
    for name, parts in products(model, Fp8Linear):
        if all(
            torch.equal(part.weight_scale, parts[0].weight_scale)
            and part.pre_quant_scale is None
            and not any(size % _MULTIPLE for size in part.weight.shape)
            for part in parts
        ):
            model.set_submodule(name, ScaledMmLinear(parts))
            count += 1
    return count


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x / scale`` as E4M3: as ``quant.formats.to_e4m3``, in one pass."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    _quantize_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, out, scale, x.numel(), BLOCK=_BLOCK)
    return out


@triton.jit
def _quantize_kernel(x, out, scale, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0)
    tl.store(out + place, quantized(value, tl.load(scale), out.dtype.element_ty), mask=place < count)
