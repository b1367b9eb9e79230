"""INT8 linears in integers: what the simulation gives, exactly but for the last rounding, in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from inflight.engine.quant import linears
from inflight.engine.quant.convert import LinearParts, join_int8_parts
from inflight.engine.quant.linears import Int8Linear, LinearShape

ROWS, COLUMNS = 96, 160
pytestmark = pytest.mark.skipif(not linears.multiplies_int8("cpu"), reason="the processor has no instructions for it")


def _linear(bias: bool = False, smoothed: bool = False) -> Int8Linear:
    shape = LinearShape("linear", ROWS, COLUMNS, bias, torch.float32, 1, smoothed, exact=True)
    linear = Int8Linear(shape).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    linear.weight.copy_(torch.randint(-128, 128, linear.weight.shape, generator=generator))
    linear.weight_scale.copy_(torch.rand(ROWS, generator=generator) + 0.01)
    linear.input_scale.fill_(0.031)
    for parameter in (linear.bias, linear.pre_quant_scale):
        if parameter is not None:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return linear


def _inputs(count: int) -> Tensor:
    return 3 * torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_it_is_the_simulation(bias: bool, smoothed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = _linear(bias, smoothed), _inputs(40)
    made = linear(x)
    monkeypatch.setattr(linears, "multiplies_int8", lambda _device: False)
    simulated = linear(x)
    assert made.dtype == torch.float32
    largest = simulated.abs().max()
    assert (made - simulated).abs().max() < 3e-7 * largest
    assert not torch.equal(made, simulated), "integers were not used"


@torch.inference_mode()
def test_integers_that_saturate_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's do on processors before VNNI, and where ONEDNN_MAX_CPU_ISA makes it take this one for such."""
    monkeypatch.setattr(torch, "_int_mm", lambda one, other: torch.full((len(one), other.shape[1]), 64 * 32767))
    assert not linears.multiplies_int8.__wrapped__("cpu")


@torch.inference_mode()
def test_sums_are_exact_where_they_are_largest() -> None:
    linear = _linear()
    linear.weight.fill_(-128)
    made = linear(torch.full((2, COLUMNS), -1e9))
    expected = (128 * 128 * COLUMNS) * (linear.weight_scale * linear.input_scale)
    assert torch.equal(made, expected.expand(2, -1))


@torch.inference_mode()
def test_rows_do_not_depend_on_each_other() -> None:
    linear, x = _linear(bias=True), _inputs(70)
    whole = linear(x)
    for count in (1, 2, 7, 16, 33):
        assert torch.equal(linear(x[:count]), whole[:count])
    assert linear(x[:0]).shape == (0, ROWS)


@torch.inference_mode()
def test_what_is_no_number_stays_none_in_its_row() -> None:
    linear, x = _linear(), _inputs(3)
    expected = linear(x)
    x[1, 7], x[2, 5] = torch.nan, torch.inf
    made = linear(x)
    assert torch.equal(made[0], expected[0])
    assert made[1].isnan().all()
    assert made[2].isfinite().all(), "what is too large saturates"


def _parts(model: LinearParts) -> list[Int8Linear]:
    return [part for part in model.children() if isinstance(part, Int8Linear)]


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_parts_of_one_input_are_one_product(bias: bool, smoothed: bool) -> None:
    parts = LinearParts((name, _linear(bias, smoothed)) for name in "qkv")
    for index, part in enumerate(_parts(parts)):
        part.weight_scale.mul_(index + 1)
    model, x = nn.Sequential(parts), _inputs(5)
    expected = model(x)
    join_int8_parts(model)
    assert isinstance(model[0], Int8Linear)
    assert torch.equal(model(x), expected)


@torch.inference_mode()
@pytest.mark.parametrize("scale", ["input_scale", "pre_quant_scale"])
def test_parts_that_round_inputs_differently_stay_apart(scale: str) -> None:
    parts = LinearParts((name, _linear(smoothed=True)) for name in "qkv")
    getattr(_parts(parts)[2], scale).mul_(2)
    model = nn.Sequential(parts)
    join_int8_parts(model)
    assert model[0] is parts
