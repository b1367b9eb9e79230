"""Linears packed by the libraries of other formats: weights decode to the same bits, inputs are rounded alike."""

from __future__ import annotations

import pytest
import torch

from inflight.engine.quant.gguf_linears import GGUF_LINEARS
from inflight.engine.quant.grouped import LINEARS
from inflight.engine.quant.linears import SCHEMES
from tests.engine.support.packed_linears import load_linear, packed_by_libraries

CASES = packed_by_libraries()
ROWS, COLUMNS = 32, 64
SCHEME = {
    "gptq, 4 bits": "W4A16_AWQ",
    "gptq, 4 bits, ordered": "W4A16_GROUPS",
    "gptq, 4 bits, asymmetric": "W4A16_GROUPS",
    "gptq, 4 bits, asymmetric, ordered": "W4A16_GROUPS",
    "gptq, 4 bits, one group": "W4A16_AWQ",
    "gptq, 8 bits": "W8A16_GROUPS",
    "gptq, 8 bits, one group": "W8A16",
    "gptq, 8 bits, asymmetric, ordered": "W8A16_GROUPS",
    "awq": "W4A16_GROUPS",
    "awq, one group": "W4A16_GROUPS",
    "compressed, int4": "W4A16_AWQ",
    "compressed, int4, asymmetric": "W4A16_GROUPS",
    "compressed, int4, rows": "W4A16_AWQ",
    "compressed, int8": "W8A16_GROUPS",
    "compressed, int8, rows": "W8A16",
    "compressed, int8, asymmetric": "W8A16_GROUPS",
    "compressed, w8a8": "W8A8_TOKENS",
    "compressed, w8a8, static": "W8A8_SQ_PER_CHANNEL",
    "compressed, w8a8, asymmetric": "W8A8_TOKENS",
    "compressed, int8 alone": "W8A16",
    "compressed, fp8": "FP8_TOKENS",
    "compressed, fp8, static": "FP8",
    "compressed, fp8, static, rows": "FP8_BLOCKS_STATIC",
    "compressed, fp8 alone": "FP8_BLOCKS",
    "compressed, fp8, blocks": "FP8_TOKENS",
    "compressed, nvfp4": "NVFP4_DIVIDED",
    "compressed, nvfp4 alone": "NVFP4_WEIGHTS",
    "compressed, mxfp4 alone": "MXFP4",
}
"""The linear that holds each: ModelOpt's where it can, since the native step and a GPU multiply those."""
each = pytest.mark.parametrize("name", CASES)


def test_every_linear_is_tested() -> None:
    assert SCHEME.keys() == CASES.keys()
    assert set(SCHEME.values()) >= LINEARS.keys() - SCHEMES.keys() - GGUF_LINEARS.keys()


@each
def test_weights_decode_to_the_same_bits(name: str) -> None:
    case = CASES[name]
    linear = load_linear(case["config"], case["tensors"], ROWS, COLUMNS)
    assert linear.quant_algo == SCHEME[name]
    assert torch.equal(linear.decode(torch.float32), case["decoded"])
    assert torch.equal(linear.decode(torch.bfloat16), case["decoded"].bfloat16())


@each
def test_weights_stay_packed(name: str) -> None:
    """With scales and zero points; groups of these small linears are short."""
    case = CASES[name]
    linear = load_linear(case["config"], case["tensors"], ROWS, COLUMNS)
    bits = 4 if linear.per_element == 2 else 8
    assert linear.weight.nbytes == ROWS * COLUMNS * bits // 8
    groups = linear.weight_scale.numel()
    assert linear.weight_bytes <= linear.weight.nbytes + 5 * groups + 4 * COLUMNS


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "inputs" in case])
def test_inputs_are_rounded_to_the_same_values(name: str) -> None:
    """Each by the largest of its own token or group, or by one scale; a token of zeros stays zero."""
    case = CASES[name]
    linear = load_linear(case["config"], case["tensors"], ROWS, COLUMNS)
    assert type(linear).rounds_inputs()
    rounded = linear.prepared(case["inputs"])
    assert torch.equal(rounded, case["rounded"])
    assert not torch.equal(rounded, case["inputs"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "inputs" not in case])
def test_inputs_of_weights_alone_are_not_rounded(name: str) -> None:
    case = CASES[name]
    linear, x = load_linear(case["config"], case["tensors"], ROWS, COLUMNS), torch.randn(3, COLUMNS)
    assert not type(linear).rounds_inputs()
    torch.testing.assert_close(linear(x), x @ case["decoded"].t())
