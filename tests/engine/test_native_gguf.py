"""The native step with weights in the blocks of GGUF files: logits near PyTorch's, and the same bits in any batch."""

from __future__ import annotations

import copy
import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.checkpoint import load_config, load_model, outline_model, resolve_dtype
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.models.layers import RmsNorm
from inflight.engine.native.bindings import NativeError, Weight, call
from inflight.engine.native.model import NativeModel
from inflight.engine.native.outline import linears_of
from inflight.engine.native.weights import quantized_parts, quantized_source
from inflight.engine.quant.gguf_blocks import FORMATS
from inflight.engine.quant.gguf_linears import GGUF_LINEARS
from inflight.engine.quant.linears import LinearShape
from inflight.gguf.checkpoint import cpu_bytes
from inflight.gguf.reader import GgufModel
from inflight.gguf.types import QUANTIZED
from tests.engine.support.gguf_files import draw_blocks, wide_gguf_file
from tests.engine.support.native import CPU, SETS, by_pytorch, each_set, make_pool

NEAR = 1e-3
"""Of logits of about one: inputs are rounded to 16 bits."""
MIXTURES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "Q4_K_M": (
        "Q6_K",
        (("q_proj", "Q4_K"), ("k_proj", "Q4_K"), ("v_proj", "Q6_K"), ("gate_proj", "Q4_K"), ("up_proj", "Q4_K")),
    ),
    "with minimums or without": (
        "IQ4_NL",
        (("q_proj", "Q5_1"), ("k_proj", "Q5_1"), ("v_proj", "Q8_0"), ("gate_proj", "Q4_0"), ("up_proj", "Q4_1")),
    ),
    "experts": ("Q6_K", (("gate_proj", "Q4_K"), ("up_proj", "Q5_K"))),
}
"""Types of weights: of most, and of some."""
PACKED = {
    "Q4_0": 4, "Q4_1": 9, "Q5_0": 5, "Q5_1": 10, "Q8_0": 5, "Q2_K": 9, "Q3_K": 4, "Q4_K": 9, "Q5_K": 10, "Q6_K": 5,
    "IQ4_NL": 5, "IQ4_XS": 5,
}  # fmt: skip
OUTPUT, EXPERT_DOWN = 1, 7
"""The library's numbers for the projection of attention's outputs, and for an expert's last product."""


def _path(name: str, tied: bool = False) -> Path:
    """Return a file in one type, or in a mixture of them."""
    return wide_gguf_file(*MIXTURES.get(name, (name,)), tied=tied, experts=name == "experts").path


@functools.cache
def _file(name: str, tied: bool = False) -> DecoderModel:
    """Return the loaded model of a file."""
    path = _path(name, tied)
    config = load_config(path)
    outline = outline_model(path, config, resolve_dtype("auto", config, CPU), CPU, 512, "auto")
    model = load_model(outline, CPU).model
    assert isinstance(model, DecoderModel)
    return model


def _native(name: str, instruction_set: str) -> tuple[DecoderModel, NativeModel]:
    model = _file(name)
    native = NativeModel(copy.deepcopy(model), instruction_set, 2)
    native.use(make_pool(model, "float32", 120, 16), 16)
    return model, native


@pytest.mark.sweep(most=8)
@each_set
@pytest.mark.parametrize("name", [*FORMATS, *MIXTURES])
def test_logits_are_those_of_pytorch_whatever_the_batch(name: str, instruction_set: str) -> None:
    tokens, whole = random.Random(3).choices(range(320), k=60), [QueryRange(0, 0, 60, range(5))]
    model = _file(name)
    expected = by_pytorch(model, make_pool(model, "float32", 120, 16), 16, tokens, whole)
    _, native = _native(name, instruction_set)
    made = native(np.array(tokens), whole, range(60))
    assert (made - expected).abs().max() / expected.std().clamp(min=1.0) < NEAR
    for start, count in ((0, 1), (1, 1), (2, 2), (4, 3), (7, 5), (12, 17), (29, 31)):
        part = native(np.array(tokens[start : start + count]), [QueryRange(0, start, count, range(5))], range(count))
        assert torch.equal(part, made[start : start + count])


@pytest.mark.parametrize("kind", GGUF_LINEARS)
def test_integers_scales_and_minimums_are_the_weight(kind: str) -> None:
    """As the library is given them; an offset of eight may cost a last bit."""
    linear = GGUF_LINEARS[kind](LinearShape("x", 6, 512, False, torch.float32, 0, False, False))
    blocks = torch.from_numpy(draw_blocks(kind, 6, 512))
    linear.weight = torch.nn.Parameter(blocks, requires_grad=False)
    source = quantized_source([linear], torch.float32)
    assert source.packed_type == PACKED[kind]
    held = QUANTIZED[kind]
    assert (source.group, source.minimums is not None) == (held.group, held.minimums)
    assert source.weight.nbytes * 8 == 6 * 512 * held.bits
    integers = source.weight
    if integers.dtype is torch.uint8:
        lower, upper = (integers << 4).view(torch.int8) >> 4, integers.view(torch.int8) >> 4
        integers = torch.stack((lower, upper), 1).flatten(0, 1)
    assert source.scales is not None
    weight = integers.float().unflatten(1, (-1, source.group)) * source.scales[..., None]
    if source.minimums is not None:
        weight += source.minimums[..., None]
    exact = source.minimums is None
    torch.testing.assert_close(weight.flatten(1), linear.decode(torch.float32), rtol=0, atol=0 if exact else 1e-7)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "tied"),
    [
        *((name, False) for name in (*FORMATS, *MIXTURES, "F16", "BF16")),
        *((name, True) for name in ("Q4_K", "Q8_0", "F16", "BF16")),
    ],
)
def test_the_memory_that_is_shown_is_that_of_what_is_packed(name: str, tied: bool) -> None:
    model = _file(name, tied)
    held = model.model.embed_tokens.weight.nbytes
    held += sum(module.weight.nbytes for module in model.modules() if isinstance(module, RmsNorm))
    for place in linears_of(model):
        if parts := quantized_parts("", place.linear):
            source = quantized_source(parts, model.dtype)
            held += sum(one.nbytes for one in (source.weight, source.scales, source.minimums) if one is not None)
        else:
            held += place.weight().nbytes
    assert cpu_bytes(GgufModel(_path(name, tied))) == held


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_minimums_that_do_not_fit_are_refused() -> None:
    _, native = _native("Q4_K", SETS[0])
    held = torch.zeros(200_000)
    fits = Weight(4, 9, held.data_ptr(), 256, 256, None, held.data_ptr(), None, 0.0, 32, held.data_ptr())
    call("inflight_set_weight", native._handle, 0, OUTPUT, 0, fits)
    for changes, words in (
        ({"minimums": None}, "type 9, and minimums that do not suit it"),
        ({"packed_type": 4}, "type 4, and minimums that do not suit it"),
        ({"type": 2}, "type 2, to be packed as type 9"),
        ({"packed_type": 10}, "type 4, to be packed as type 10"),
        ({"type": 2, "packed_type": 10, "group": 0}, "has type 10 in groups of 0"),
        ({"type": 2, "packed_type": 5, "minimums": None, "group": 8}, "has type 5 in groups of 8"),
        ({"type": 2, "packed_type": 6, "minimums": None, "input_scale": 1.0}, "has type 6 in groups of 32"),
        ({"scales": None}, "scales that do not suit it"),
    ):
        weight = Weight(*(changes.get(name, getattr(fits, name)) for name, _ in Weight._fields_))
        with pytest.raises(NativeError, match=words):
            call("inflight_set_weight", native._handle, 0, OUTPUT, 0, weight)


@pytest.mark.skipif(not SETS, reason="no kernels run here")
@pytest.mark.parametrize("group", [0, 32])
def test_experts_in_other_groups_than_the_others_are_refused(group: int) -> None:
    """Their memory is divided evenly. No group at all stands for one that the kernels have chosen."""
    _, native = _native("experts", SETS[0])
    held = torch.zeros(200_000)
    weight = Weight(2, 5, held.data_ptr(), 256, 256, None, held.data_ptr(), None, 0.0, group)
    with pytest.raises(NativeError, match=rf"type 5 in groups of {group or 64}; another's has type 5 in groups of 16"):
        call("inflight_set_weight", native._handle, 1, EXPERT_DOWN, 0, weight)
