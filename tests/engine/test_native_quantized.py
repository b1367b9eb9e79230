"""The native step with weights of quantized checkpoints: logits near PyTorch's, and the same bits in any batch."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.models.decoder import DecoderModel
from inflight.engine.native import prepare
from inflight.engine.native.bindings import NativeError, Weight, call
from inflight.engine.native.model import NativeModel
from inflight.engine.quant.config import LayerQuantization, Quantization
from inflight.engine.quant.convert import convert_linears
from inflight.engine.quant.linears import (
    Int4WeightLinear,
    Int8Linear,
    Int8WeightLinear,
    Layout,
    LinearShape,
    QuantizedLinear,
)
from tests.engine.support.native import CPU, SETS, VOCAB, by_pytorch, each_set, make_pool, random_decoder
from tests.support.pairs import pairwise

NEAR, ROUNDED = 1e-3, 0.25
"""Of logits of about one: inputs of 16 bits, and float32 sums, beside float64's; and where inputs are rounded to eight
bits, a last bit tips some of them to their neighbours, which are 1/16 apart in E4M3."""
HALF = 0.1
"""Where lm_head is multiplied with inputs in bfloat16."""
SCHEMES = {
    "FP8": ROUNDED,
    "W8A16": NEAR,
    "W4A16_AWQ": NEAR,
    "W8A8_SQ_PER_CHANNEL": ROUNDED,
    "W4A8_AWQ": ROUNDED,
    "W4A16_GROUPS": NEAR,
    "W8A16_GROUPS": NEAR,
    "FP8_BLOCKS": NEAR,
    "FP8_BLOCKS_STATIC": ROUNDED,
    "FP8_TOKENS": ROUNDED,
    "W8A8_TOKENS": ROUNDED,
    "MXFP4": NEAR,
}
LAYOUTS = {
    "W4A16_GROUPS": Layout(zero_points=True),
    "W8A16_GROUPS": Layout(zero_points=True),
    "FP8_BLOCKS": Layout(block_rows=24),
    "FP8_TOKENS": Layout(input_group=16),
}
WHOLE_ROWS = ("FP8_BLOCKS_STATIC", "W8A8_TOKENS")
"""The schemes that are tested with one scale for each row."""
OUTPUT = 1
"""The library's number for the projection of attention's outputs."""
each_scheme = pytest.mark.parametrize("scheme", SCHEMES)
GROUP = {"llama": 16, "odd sizes": 4, "biases": 8, "gemma": 16, "long groups": 128}
LONG = ("W4A16_AWQ", "W4A16_GROUPS", "W8A16_GROUPS", "FP8_TOKENS")
"""The schemes whose groups of less than 16 are left to PyTorch."""
SERVED = [
    (name, scheme)
    for name in GROUP
    for scheme in SCHEMES
    if (scheme not in LONG or GROUP[name] >= 16) and (scheme != "MXFP4" or name == "long groups")
]
"""Only one shape has sizes that MXFP4 divides."""


def _quantized(name: str, scheme: str, smoothed: bool = False, dtype: torch.dtype = torch.float32) -> DecoderModel:
    """Return a model whose linears are drawn in a scheme, with outputs of about one; lm_head is not quantized."""
    model = random_decoder(name, dtype)
    layers = [key for key, _ in model.named_modules() if key.startswith("model.layers")]
    scales = {
        f"{key}.{part}_proj.pre_quant_scale" for key in layers for part in ("q", "k", "v", "o", "up", "gate", "down")
    }
    head = model.lm_head.weight
    kind = LayerQuantization(scheme, 0 if scheme in WHOLE_ROWS else GROUP[name], LAYOUTS.get(scheme, Layout()))
    convert_linears(model, Quantization(kind, ("lm_head",), {}, False), scales if smoothed else (), exact=True)
    model.lm_head.weight = head
    generator = torch.Generator().manual_seed(0)
    shared = dict[int, Tensor]()
    for linear in [module for module in model.modules() if isinstance(module, QuantizedLinear)]:
        for key, meta in list(linear.named_parameters(recurse=False)):
            values = _draw(key, meta, linear, generator)
            if key == "pre_quant_scale":
                values = shared.setdefault(len(values), values)
            setattr(linear, key, torch.nn.Parameter(values.to(meta.dtype), requires_grad=False))
    return model.eval().requires_grad_(False)


def _draw(key: str, meta: Tensor, linear: QuantizedLinear, generator: torch.Generator) -> Tensor:
    size, columns = meta.shape, linear.weight.shape[1]
    if key == "input_scale":
        return torch.tensor(1 / 24 if isinstance(linear, Int8Linear) else 1 / 64)
    if key == "pre_quant_scale":
        return torch.rand(size, generator=generator) + 0.5
    if key == "bias":
        return torch.randn(size, generator=generator)
    if key == "weight_scale_2":
        return torch.tensor(1 / 512)
    if key == "weight_scale" and meta.dtype is torch.uint8:
        return torch.randint(121, 124, size, generator=generator, dtype=torch.uint8)
    if key == "weight_scale":
        deviation = {torch.uint8: 4.6, torch.int8: 40.0, torch.float8_e4m3fn: 100.0}[linear.weight.dtype]
        spread = torch.rand(size, generator=generator) + 0.5 if size else torch.tensor(1.0)
        return spread / (deviation * columns**0.5)
    if key == "zero_point":
        return torch.randint(-8, 8, size, generator=generator)
    if meta.dtype is torch.uint8:
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    values = torch.randn(size, generator=generator) * (40 if meta.dtype is torch.int8 else 100)
    return values.clamp(-127, 127).round().to(torch.int8) if meta.dtype is torch.int8 else values.to(meta.dtype)


def _widened(model: DecoderModel) -> DecoderModel:
    """Return a model that computes in float32, as the kernels do between products, from the same numbers."""
    wide = copy.deepcopy(model)
    for module in wide.modules():
        for key, held in list(module.named_parameters(recurse=False)):
            if held.dtype is torch.bfloat16:
                setattr(module, key, torch.nn.Parameter(held.float(), requires_grad=False))
    return wide


def _native(model: DecoderModel, instruction_set: str, kind: str = "float32") -> NativeModel:
    native = NativeModel(copy.deepcopy(model), instruction_set, 2)
    native.use(make_pool(model, kind, 120, 16), 16)
    return native


def _tokens(count: int) -> list[int]:
    return random.Random(3).choices(range(VOCAB), k=count)


@pytest.mark.sweep(most=24)
@pytest.mark.parametrize(
    ("served", "instruction_set", "smoothed", "dtype"),
    pairwise(SERVED, SETS, [False, True], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_logits_are_those_of_pytorch(
    served: tuple[str, str], instruction_set: str, smoothed: bool, dtype: torch.dtype
) -> None:
    name, scheme = served
    if scheme == "W4A8_AWQ":
        dtype = torch.float32  # in bfloat16 its weights are others, as ModelOpt has them (test_quant_parity.py)
    model = _quantized(name, scheme, smoothed, dtype)
    tokens = _tokens(60)
    ranges = [QueryRange(0, 0, 60, range(5))]
    expected = by_pytorch(_widened(model), make_pool(model, "float32", 120, 16), 16, tokens, ranges)
    made = _native(model, instruction_set)(np.array(tokens), ranges, range(60))
    spread = expected.std().clamp(min=1.0)
    assert (made - expected).abs().max() / spread < max(SCHEMES[scheme], HALF * (dtype is torch.bfloat16))
    own, other = (logits.double().log_softmax(-1) for logits in (expected / spread, made / spread))
    assert (own.exp() * (own - other)).sum(-1).mean() < 1.5e-3


@each_set
@pytest.mark.parametrize("scheme", ["W8A16", "W4A16_AWQ"])
@pytest.mark.parametrize("zeros", [True, False])
def test_inputs_that_stand_out_cost_the_others_nothing(scheme: str, instruction_set: str, zeros: bool) -> None:
    """Thousands of times as large, two of them in one group, and multiplied with zeros, so that the others are seen; or
    tens of times as large, and multiplied with what the weights have there."""
    model = _quantized("llama", scheme, smoothed=True)
    for linear in [module for module in model.modules() if isinstance(module, QuantizedLinear)]:
        for input_, factor in ((2, 4096.0), (5, -3900.0), (40, 3800.0)):
            linear.get_parameter("pre_quant_scale")[input_] = factor if zeros else factor / 100
            if zeros:
                linear.weight[:, input_] = 0
    tokens, ranges = _tokens(60), [QueryRange(0, 0, 60, range(5))]
    expected = by_pytorch(model, make_pool(model, "float32", 120, 16), 16, tokens, ranges)
    made = _native(model, instruction_set)(np.array(tokens), ranges, range(60))
    assert (made - expected).abs().max() / expected.std().clamp(min=1.0) < NEAR


@pytest.mark.sweep(most=16)
@pytest.mark.parametrize(
    ("name", "scheme", "instruction_set"),
    pairwise(list(GROUP), list(SCHEMES), SETS, allowed=lambda name, scheme, _: (name, scheme) in SERVED),
)
def test_a_token_is_the_same_bits_however_many_are_computed_with_it(
    name: str, scheme: str, instruction_set: str
) -> None:
    native, tokens = _native(_quantized(name, scheme), instruction_set, "int8"), np.array(_tokens(300))
    whole = native(tokens, [QueryRange(0, 0, 300, range(20))], range(300))
    assert whole.isfinite().all()
    for sizes in ([1, 2, 3, 4, 5, 6, 7, 11, 12, 249], [150, 150], [37] * 8 + [4]):
        at, parts = 0, []
        for size in sizes:
            ranges = [QueryRange(0, 0, 5, range(40, 60)), QueryRange(5, at, size, range(20))]
            if size % 2:
                ranges = [QueryRange(0, at, size, range(20))]
            other = 0 if size % 2 else 5
            step = np.concatenate((tokens[:other], tokens[at : at + size]))
            parts.append(native(step, ranges, range(other, other + size)))
            at += size
        assert torch.equal(torch.cat(parts), whole), sizes


@each_set
@each_scheme
def test_nan_stays_in_its_row(scheme: str, instruction_set: str) -> None:
    model = _quantized("long groups" if scheme == "MXFP4" else "llama", scheme)
    native, tokens = _native(model, instruction_set), np.array(_tokens(40)) % (VOCAB - 1)
    ranges = [QueryRange(0, 0, 20, range(2)), QueryRange(20, 0, 20, range(2, 4))]
    clean = native(tokens, ranges, range(40))
    spoilt_model = copy.deepcopy(model)
    spoilt_model.model.embed_tokens.weight[VOCAB - 1] = torch.nan
    native, tokens[30] = _native(spoilt_model, instruction_set), VOCAB - 1
    spoilt = native(tokens, ranges, range(40))
    assert torch.equal(spoilt[:30], clean[:30])
    assert spoilt[30:].isnan().all()


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_what_the_kernels_do_not_multiply_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """PyTorch computes it, with the weights that it has kept."""
    caplog.set_level("INFO")
    different = _quantized("llama", "W8A16")
    part = different.model.layers[0].self_attn.qkv_proj.k_proj
    part.pre_quant_scale = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    groups = _quantized("llama", "W4A16_AWQ")
    part = groups.model.layers[0].self_attn.qkv_proj.k_proj
    part.weight_scale = torch.nn.Parameter(part.weight_scale[:, :2].contiguous(), requires_grad=False)
    for model, words in (
        (groups, "the parts of model.layers.0.self_attn.qkv_proj have groups of 16 and 32 inputs"),
        (_quantized("llama", "NVFP4"), "model.layers.0.self_attn.qkv_proj is quantized in NVFP4"),
        (
            _quantized("biases", "W4A16_AWQ"),
            "model.layers.0.self_attn.qkv_proj has groups of 8 inputs",
        ),
        (different, "the parts of model.layers.0.self_attn.qkv_proj are quantized differently"),
    ):
        assert prepare.native_model(model, CPU, "auto", 1) is None
        assert f"PyTorch computes the steps: {words}" in caplog.text
        assert all(module.weight.numel() for module in model.modules() if isinstance(module, QuantizedLinear))


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_experts_that_are_quantized_differently_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """And so is a router that is quantized; PyTorch computes the model, with the weights that it has kept."""
    caplog.set_level("INFO")
    different, router = random_decoder("experts"), random_decoder("experts")
    for model, name in ((different, "model.layers.1.mlp.experts.5.down_proj"), (router, "model.layers.1.mlp.gate")):
        linear = model.get_submodule(name)
        assert isinstance(linear, torch.nn.Linear)
        shape = LinearShape(name, linear.out_features, linear.in_features, False, torch.float32, 16, False, True)
        model.set_submodule(name, Int8WeightLinear(shape))
    for model, words in (
        (different, "model.layers.1.mlp.experts.5.down_proj is quantized in another way than the same of the layer's "),
        (router, "the router of layer 1 is quantized"),
    ):
        assert prepare.native_model(model, CPU, "auto", 1) is None
        assert f"PyTorch computes the steps: {words}" in caplog.text
        assert model.model.layers[0].mlp.gate_up_proj.weight.numel()


@each_set
def test_int8_rounds_what_the_checkpoint_has_not_quantized(
    instruction_set: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lm_head, and nothing else."""
    caplog.set_level("INFO")
    model, tokens, ranges = _quantized("llama", "W4A16_AWQ"), np.array(_tokens(60)), [QueryRange(0, 0, 60, range(5))]
    own = _native(model, instruction_set)(tokens, ranges, range(60))
    native = prepare.native_model(copy.deepcopy(model), CPU, instruction_set, 2, "int8")
    assert native is not None
    assert "from weights in W4A16_AWQ, INT8" in caplog.text
    native.use(make_pool(model, "float32", 120, 16), 16)
    rounded = native(tokens, ranges, range(60))
    assert 0 < (rounded - own).abs().max() / own.std() < 0.05


@each_set
def test_weights_that_do_not_fit_are_refused(instruction_set: str) -> None:
    """A type that is packed as another, scales that are missing or too many, and sizes that cannot be added up."""
    native, held = _native(random_decoder("llama"), instruction_set), torch.zeros(200_000, dtype=torch.float32)
    fits = Weight(4, 4, held.data_ptr(), 64, 64, None, held.data_ptr(), None, 0.0, 16)
    call("inflight_set_weight", native._handle, 0, OUTPUT, 0, fits)
    for changes, words in (
        ({"type": 2}, "type 2, to be packed as type 4"),
        ({"type": 1}, "type 1, to be packed as type 4"),
        ({"packed_type": 3}, "type 4, to be packed as type 3"),
        ({"outputs": 63}, r"is \[63, 64\]; expected \[64, 64\]"),
        ({"scales": None}, "scales that do not suit it"),
        ({"minimums": held.data_ptr()}, "minimums that do not suit it"),
        ({"packed_type": 9}, "minimums that do not suit it"),
        ({"packed_type": 9, "minimums": held.data_ptr(), "group": 8}, "type 9 in groups of 8"),
        ({"input_group": 64}, "or of groups of 64"),
        ({"type": 3, "packed_type": 3, "group": 0, "input_group": 24}, "or of groups of 24"),
        ({"type": 3, "packed_type": 3, "group": 0, "input_group": -16}, "or of groups of -16"),
        ({"type": 3, "packed_type": 3, "group": 0, "input_group": 64, "input_scale": 1.0}, "scale of 1, or of groups"),
        ({"type": 3, "packed_type": 8, "group": 0}, "type 8 in groups of 0"),
        ({"type": 3, "packed_type": 8, "group": -4}, "type 8 in groups of -4"),
        ({"type": 2, "packed_type": 5, "group": 48}, "type 5 in groups of 48"),
        ({"type": 2, "packed_type": 6, "group": 0, "input_group": 32}, "or of groups of 32"),
        ({"group": 0}, r"of \[64, 64\] has type 4 in groups of 0"),
        ({"group": 8}, "in groups of 8"),
        ({"group": 48}, "in groups of 48"),
        ({"group": 128}, "in groups of 128"),
        ({"input_scale": 0.5}, "inputs with a scale of 0.5"),
        ({"type": 2, "packed_type": 6, "group": 0}, "inputs with a scale of 0"),
        ({"type": 3, "packed_type": 3, "group": 0, "input_scale": float("nan")}, "inputs with a scale of nan"),
        ({"type": 2, "packed_type": 6, "input_scale": 1.0}, "in groups of 16"),
        ({"type": 0, "packed_type": 0, "group": 0}, "scales that do not suit it"),
    ):
        weight = Weight(*(changes.get(name, getattr(fits, name)) for name, _ in Weight._fields_))
        with pytest.raises(NativeError, match=words):
            call("inflight_set_weight", native._handle, 0, OUTPUT, 0, weight)


@pytest.mark.skipif(not SETS, reason="no kernels run here")
def test_the_log_names_the_scheme_and_the_weights_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    model = _quantized("llama", "W4A16_AWQ")
    assert prepare.native_model(model, CPU, "auto", 1) is not None
    assert "from weights in W4A16_AWQ" in caplog.text
    linears = [module for module in model.modules() if isinstance(module, Int4WeightLinear)]
    assert linears
    assert not any(linear.weight.numel() or linear.weight_scale.numel() for linear in linears)
