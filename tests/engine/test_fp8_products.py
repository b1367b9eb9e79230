"""FP8 products: where they are put, and that they compute what the decoded linear does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from inflight.engine.cuda import fp8
from inflight.engine.quant.convert import LinearParts
from inflight.engine.quant.formats import to_e4m3
from inflight.engine.quant.linears import Fp8Linear, LinearShape
from tests.engine.support.fake_card import FakeCard


def _linear(rows: int = 32, bias: bool = False, smoothed: bool = False, **scales: float) -> Fp8Linear:
    """Return a linear of 48 columns; decoding is exact with scales that are powers of two."""
    columns = 48
    shape = LinearShape("layer", rows, columns, bias, torch.bfloat16, 0, smoothed, exact=False)
    linear = Fp8Linear(shape).to_empty(device="cpu").requires_grad_(False)
    linear.weight.copy_((100 * torch.randn(rows, columns)).to(torch.float8_e4m3fn))
    linear.weight_scale.fill_(scales.get("weight", 2.0**-7))
    linear.input_scale.fill_(scales.get("input", 2.0**-6))
    if linear.bias is not None:
        linear.bias.normal_()
    if linear.pre_quant_scale is not None:
        linear.pre_quant_scale.fill_(1)
    return linear


def _strict(a: Tensor, b: Tensor, **more: Any) -> Tensor:
    """Insist on what ``torch._scaled_mm`` insists on with CUDA (ATen/native/cuda/ScaledBlas.cpp), and call it."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert a.stride() == (a.shape[1], 1), "the left matrix lies by rows"
    assert b.stride() == (1, b.shape[0]), "the right one by columns"
    assert not any(size % 16 for size in b.shape)
    assert all(more[scale].dtype == torch.float32 and more[scale].numel() == 1 for scale in ("scale_a", "scale_b"))
    assert more["out_dtype"] == torch.bfloat16
    assert more["use_fast_accum"] is True
    assert more["bias"] is None or more["bias"].dtype == torch.bfloat16
    return _scaled_mm(a, b, **more)


_scaled_mm = torch._scaled_mm


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be strict, as CUDA is; and round inputs exactly, as the interpreter does not: it cuts them off."""
    monkeypatch.setattr(torch, "_scaled_mm", _strict)
    monkeypatch.setattr(fp8, "quantize", to_e4m3)


class _Model(nn.Module):
    def __init__(self, **linears: nn.Module) -> None:
        super().__init__()
        for name, linear in linears.items():
            self.add_module(name, linear)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_the_decoded_linears(bias: bool) -> None:
    torch.manual_seed(0)
    parts = LinearParts((name, _linear(rows, bias=bias)) for name, rows in (("q", 32), ("k", 16), ("v", 16)))
    model = _Model(qkv=parts, down=_linear(bias=bias))
    x = torch.randn(5, 48).bfloat16()
    expected = [model.qkv(x), model.down(x)]
    assert fp8.use_scaled_mm(model) == 2
    assert isinstance(model.qkv, fp8.ScaledMmLinear)
    for seen, wanted in zip((model.qkv(x), model.down(x)), expected, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("tensor_cores")
def test_what_does_not_suit_stays() -> None:
    model: Any = _Model(odd=_linear(rows=24), smoothed=_linear(smoothed=True), plain=nn.Linear(16, 16))
    assert fp8.use_scaled_mm(model) == 0
    assert isinstance(model.odd, Fp8Linear)
    parts = LinearParts((("q", _linear()), ("k", _linear(input=0.5)), ("v", _linear(rows=24))))
    assert fp8.use_scaled_mm(model := _Model(qkv=parts)) == 2, "parts of different scales are products of their own"
    assert isinstance(model.qkv.q, fp8.ScaledMmLinear)
    assert isinstance(model.qkv.v, Fp8Linear)


def test_what_becomes_a_product_is_not_held_beside_it() -> None:
    """FP8 weights that fill most of a card would not fit there twice."""
    card = FakeCard(1 << 30)
    with card:
        model = _Model(**{f"layer{index}": _linear(512) for index in range(20)})
        one = model.layer0.weight.nbytes
        peak = card.peak_of(lambda: fp8.use_scaled_mm(model))
    assert isinstance(model.layer19, fp8.ScaledMmLinear)
    assert peak < 4 * one


def test_inputs_are_rounded_in_one_pass() -> None:
    scale = torch.tensor(2.0**-5)
    x = (torch.randn(3, 1100) * 20).to(torch.float8_e4m3fn).float() * scale  # the interpreter cuts off what it rounds
    x[0, :2] = torch.tensor([1e6, -1e6])
    assert torch.equal(fp8.quantize(x, scale).view(torch.uint8), to_e4m3(x, scale).view(torch.uint8))


@pytest.mark.parametrize("columns", [4096, 14_336])
def test_adding_up_fast_costs_far_less_than_rounding_to_e4m3(columns: int) -> None:
    """Emulate it as it was found on compute capability 9.0: by 32 products, with 13 bits below the largest's.

    DeepSeek-V3 technical report, arXiv:2412.19437, section 3.5.2.
    """
    torch.manual_seed(0)
    x, weight = torch.randn(8, columns).double(), torch.randn(16, columns).double()
    rounded = [to_e4m3(part, scale := part.abs().max() / 448).double() * scale for part in (x, weight)]
    exact = rounded[0] @ rounded[1].t()
    total = torch.zeros_like(exact)
    for group in range(0, columns, 32):
        products = rounded[0][:, None, group : group + 32] * rounded[1][None, :, group : group + 32]
        terms = torch.cat((products, total[..., None]), -1)
        step = 2 ** (terms.abs().amax(-1, keepdim=True).log2().floor() - 13)
        total = ((terms / step).trunc() * step).sum(-1)
    lost = (total - exact).norm() / exact.norm()
    by_rounding = (exact - x @ weight.t()).norm() / exact.norm()
    assert 0 < lost < by_rounding / 6
