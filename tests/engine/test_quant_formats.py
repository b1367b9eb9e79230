"""Number formats: packing comes back as it went in, and rounding is ModelOpt's, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inflight.engine.quant.formats import (
    E4M3_MAX,
    fake_e4m3,
    fake_int8,
    fake_nvfp4,
    to_e4m3,
    unpack_e2m1,
    unpack_int4,
)
from tests.engine.support import quantized  # imports ModelOpt without its warnings  # noqa: F401

from modelopt.torch.export.quant_utils import pack_int4_in_uint8  # isort: skip
from modelopt.torch.quantization.qtensor import NVFP4QTensor  # isort: skip
from modelopt.torch.quantization.tensor_quant import _tensor_quant, fp8_eager  # isort: skip

_E2M1 = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
_finite = st.floats(-1e4, 1e4, width=32)
_scales = st.integers(-12, 6).map(lambda power: 2.0**power)


def _matrix(values: Any, rows: int, columns: int) -> st.SearchStrategy[Tensor]:
    return st.lists(values, min_size=rows * columns, max_size=rows * columns).map(
        lambda items: torch.tensor(items).view(rows, columns)
    )


@given(weight=_matrix(st.integers(-8, 7), 6, 8))
def test_int4_as_modelopt_packs_it(weight: Tensor) -> None:
    packed = pack_int4_in_uint8(weight.float(), torch.ones(6, 2), 4)
    assert packed.shape == (3, 8)
    assert torch.equal(unpack_int4(packed), weight.to(torch.int8))


def test_every_byte_of_int4_and_e2m1() -> None:
    """Two's complements, the even row (column) below; a sign bit, then the place in the table."""
    every = torch.arange(256, dtype=torch.uint8)
    signed = [value - 16 if value > 7 else value for value in range(16)]
    lower, upper = unpack_int4(every[None]).tolist()
    assert lower == [signed[byte & 15] for byte in range(256)]
    assert upper == [signed[byte >> 4] for byte in range(256)]
    pairs = unpack_e2m1(every[:, None]).tolist()
    assert pairs == [[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)]


@given(weight=_matrix(st.floats(-3, 3, width=32), 4, 32))
def test_nvfp4_weights_as_modelopt_decodes_them(weight: Tensor) -> None:
    weight[0, 0] = 3.0  # a tensor of nothing but zeros has no scale
    packed, scales, scale = NVFP4QTensor.quantize(weight.clone(), 16)
    expected = packed.dequantize(torch.float32, scale=scales, double_scale=scale, block_sizes={-1: 16})
    ours = unpack_e2m1(packed._quantized_data).unflatten(-1, (-1, 16)) * (scales.float() * scale)[..., None]
    assert torch.equal(ours.flatten(-2), expected)


@given(x=_matrix(_finite, 3, 32), scale=_scales)
def test_nvfp4_inputs_are_rounded_as_modelopt_packs_them(x: Tensor, scale: float) -> None:
    packed, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, None, torch.tensor(scale))
    expected = packed.dequantize(torch.float32, scale=scales, double_scale=torch.tensor(scale), block_sizes={-1: 16})
    # ModelOpt has no block scale below 2^-9 where it packs, and has them down to zero where it simulates.
    compared = (x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True) / 6 / scale >= 2**-9).expand(-1, -1, 16)
    ours = fake_nvfp4(x, torch.tensor(scale)).unflatten(-1, (-1, 16))
    assert torch.equal(ours[compared], expected.unflatten(-1, (-1, 16))[compared])


def test_nvfp4_rounds_ties_to_even_and_keeps_zeros() -> None:
    x = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -2.5, -5, 0.26, 5.01, 0, 3.0])
    expected = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -2, -4, 0.5, 6, 0, 3.0])
    assert torch.equal(fake_nvfp4(x, torch.tensor(1.0)), expected)
    assert torch.equal(fake_nvfp4(torch.zeros(2, 16), torch.tensor(1.0)), torch.zeros(2, 16))


@pytest.mark.parametrize("fake", [fake_e4m3, fake_int8, fake_nvfp4])
def test_nan_stays_nan(fake: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.zeros(2, 32)
    x[0, 3] = math.nan
    rounded = fake(x, torch.tensor(1.0))
    assert rounded[0, 3].isnan()
    assert not rounded[0, 16:].isnan().any()
    assert not rounded[1].isnan().any()


@given(x=_matrix(_finite, 2, 8), scale=_scales)
def test_rounding_to_8_bits_is_modelopts(x: Tensor, scale: float) -> None:
    at = torch.tensor(scale)
    assert torch.equal(fake_e4m3(x, at), fp8_eager(x, at * 448))
    assert torch.equal(fake_int8(x, at), _tensor_quant(x, at * 127, 8, False, False))


@given(x=_matrix(_finite, 2, 16), scale=_scales)
def test_rounding_twice_is_rounding_once(x: Tensor, scale: float) -> None:
    for fake in (fake_e4m3, fake_int8):
        once = fake(x, torch.tensor(scale))
        assert torch.equal(fake(once, torch.tensor(scale)), once)


def test_e4m3_saturates_and_what_is_no_number_stays_none() -> None:
    wide = to_e4m3(torch.tensor([1e9, -1e9, math.inf, 465.0, math.nan]), torch.tensor(1.0)).float()
    assert wide[:4].tolist() == [E4M3_MAX, -E4M3_MAX, E4M3_MAX, E4M3_MAX]
    assert wide[4].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_types_stay(dtype: torch.dtype) -> None:
    x, scale = torch.randn(4, 16, dtype=dtype), torch.tensor(0.1)
    assert all(fake(x, scale).dtype is dtype for fake in (fake_e4m3, fake_int8, fake_nvfp4))
