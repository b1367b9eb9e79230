"""Weights decoded once: they compute what decoding for each call does, where there is memory for it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inflight.engine.cuda import prepare
from inflight.engine.models.layers import each_of
from inflight.engine.quant import decoding, gguf_linears
from inflight.engine.quant.convert import DecodedLinear, LinearParts, decode_weights, decoding_cost
from inflight.engine.quant.formats import decode_e8m0, to_e4m3
from inflight.engine.quant.gguf_blocks import decode
from inflight.engine.quant.linears import SCHEMES, LinearShape, QuantizedLinear
from inflight.engine.scoring import Scorer
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import TOKENS
from tests.engine.support.driving import ask, load, run
from tests.engine.support.fake_card import FakeCard
from tests.engine.support.gguf_files import wide_gguf_file
from tests.engine.support.packed_models import published

CUDA = torch.device("cuda")
COLUMNS = 64


def _linear(
    scheme: str,
    rows: int = 32,
    *,
    input_scale: float = 0.01,
    bias: bool = True,
    smoothed: bool = True,
    exact: bool = False,
) -> QuantizedLinear:
    """Return a loaded linear with random weights, smoothed by powers of two."""
    shape = LinearShape("layer", rows, COLUMNS, bias, torch.float32, 16, smoothed, exact=exact)
    linear = SCHEMES[scheme](shape).to_empty(device="cpu").requires_grad_(False)
    for name, parameter in linear.named_parameters():
        if name == "input_scale":
            parameter.fill_(input_scale)
        elif name == "pre_quant_scale":
            parameter.copy_(2.0 ** (torch.arange(COLUMNS) % 3))
        elif parameter.dtype == torch.float8_e4m3fn:
            parameter.copy_(to_e4m3(torch.rand(parameter.shape) * 4, torch.tensor(1.0)))
        elif parameter.dtype in (torch.int8, torch.uint8):
            parameter.copy_(torch.randint(-100, 100, parameter.shape).to(parameter.dtype))
        else:
            parameter.copy_(torch.rand(parameter.shape) / 8)
    return linear


class _Model(nn.Module):
    def __init__(self, **linears: nn.Module) -> None:
        super().__init__()
        self.dtype, self.device = torch.float32, torch.device("cpu")
        for name, linear in linears.items():
            self.add_module(name, linear)


def _inputs() -> Tensor:
    return torch.randn(5, COLUMNS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_decoded_linear_computes_what_it_was_made_of(scheme: str) -> None:
    torch.manual_seed(0)
    linear, x = _linear(scheme), _inputs()
    expected = QuantizedLinear.forward(linear, x)
    decoded = DecodedLinear([linear], torch.float32)
    assert torch.equal(decoded(x), expected)
    held = dict(decoded.named_parameters())
    assert held.pop("weight").shape == (32, COLUMNS)
    assert all(parameter.numel() <= COLUMNS for parameter in held.values()), "the packed weight is still held"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_one_input_become_one_product(scheme: str) -> None:
    torch.manual_seed(1)
    parts = [_linear(scheme, rows) for rows in (32, 16, 16)]
    model: Any = _Model(qkv=LinearParts(zip("qkv", parts, strict=True)), down=_linear(scheme, bias=False))
    x = _inputs()
    expected = torch.cat([QuantizedLinear.forward(part, x) for part in parts], -1), model.down(x)
    linears, more = decoding_cost(model, torch.float32)
    held = sum(parameter.nbytes for name, parameter in model.named_parameters() if "weight" in name)
    decode_weights(model, torch.float32)
    assert isinstance(model.qkv, DecodedLinear)
    torch.testing.assert_close(model.qkv(x), expected[0], rtol=1e-4, atol=1e-4)  # another order of sums
    torch.testing.assert_close(model.down(x), expected[1], rtol=1e-4, atol=1e-4)
    assert (linears, held + more) == (4, model.qkv.weight.nbytes + model.down.weight.nbytes)
    assert decoding_cost(model, torch.float32) == (0, 0)


def test_parts_that_round_inputs_differently_stay_apart() -> None:
    parts = {"q": _linear("NVFP4"), "k": _linear("NVFP4", input_scale=0.5), "v": nn.Linear(COLUMNS, 16)}
    model: Any = _Model(qkv=LinearParts(parts.items()))
    x = _inputs()
    expected = model.qkv(x)
    decode_weights(model, torch.float32)
    assert [type(part) for part in model.qkv.children()] == [DecodedLinear, DecodedLinear, nn.Linear]
    assert torch.equal(model.qkv(x), expected)


def test_what_is_decoded_is_not_held_beside_it() -> None:
    """Weights that are packed go one by one, or decoding would take more than was counted before."""
    card = FakeCard(1 << 30)
    with card:
        model: Any = _Model(**{f"layer{index}": _linear("W4A16_AWQ", bias=False) for index in range(40)})
        _, more = decoding_cost(model, torch.float32)
        peak = card.peak_of(lambda: decode_weights(model, torch.float32))
    assert peak <= more + 4 * model.layer0.weight.nbytes, "and a few of one linear's"


def test_modules_that_were_replaced_are_gone() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    weights = [weakref.ref(module.weight) for module in model]
    for index, (name, _) in enumerate(each_of(model, nn.Linear)):
        assert [weight() is None for weight in weights] == [place < index for place in range(5)]
        model.set_submodule(name, nn.Identity())


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "kv_cache", "decodes"),
    [
        (8 * GIB, 2 * GIB, True),
        (GIB, GIB // 4, False),  # nothing is left for steps
        (8 * GIB, 4 * GIB, True),
        (8 * GIB, 7 * GIB, False),
        (8 * GIB, 7 * GIB - (32 * COLUMNS * 7 // 2 - 32 * 4 * 4), True),  # it fits to the byte
        (8 * GIB, 7 * GIB - (32 * COLUMNS * 7 // 2 - 32 * 4 * 4) + 1, False),
    ],
)
def test_memory_decides_and_the_log_says_so(
    free: int, kv_cache: int, decodes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decoding, "free_memory", lambda device: free)
    model: Any = _Model(down=_linear("W4A16_AWQ"))
    asked: list[int] = []

    def reserved(free: int) -> int:
        asked.append(free)
        return kv_cache

    prepare.prepare_weights(model, CUDA, reserved)
    assert asked == [free]
    assert isinstance(model.down, DecodedLinear) == decodes
    assert ("are decoded once, and take" in caplog.text) == decodes
    assert ("are decoded in each step" in caplog.text) != decodes


def test_invariant_products_need_decoded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decoding, "free_memory", lambda device: GIB)
    model: Any = _Model(down=_linear("W4A16_AWQ"))
    with pytest.raises(DeploymentError, match="batch_invariant needs the weights of 1 linears decoded, which take"):
        prepare.prepare_weights(model, CUDA, lambda free: GIB, batch_invariant=True)
    monkeypatch.setattr(decoding, "free_memory", lambda device: 8 * GIB)
    prepare.prepare_weights(model, CUDA, lambda free: GIB, batch_invariant=True)
    assert type(model.down).__name__ == "InvariantLinear"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu_each_linear_computes_to_the_bit_what_it_did(scheme: str, exact: bool) -> None:
    torch.manual_seed(2)
    parts = [_linear(scheme, rows, exact=exact) for rows in (32, 16)]
    model: Any = _Model(qkv=LinearParts(zip("qk", parts, strict=True)), down=_linear(scheme, exact=exact))
    for x in (_inputs(), _inputs()[:1]):
        packed: Any = copy.deepcopy(model)
        expected = packed.qkv(x), packed.down(x)
        decode_weights(packed, torch.float32, joined=False)
        assert torch.equal(packed.qkv(x), expected[0])
        assert torch.equal(packed.down(x), expected[1])
        stays = not parts[0].decodes_each_time(torch.float32)
        assert [type(part) for part in packed.qkv.children()] == [type(parts[0]) if stays else DecodedLinear] * 2
        assert decoding_cost(packed, torch.float32, joined=False) == (0, 0)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_an_engine_on_pytorch_decodes_once_where_there_is_room(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    requests = [ask(TOKENS[:size], 6, log_probs=True) for size in (20, 1)]
    calls: list[str] = []

    def counted(weight: Tensor, kind: str) -> Tensor:
        calls.append(kind)
        return decode(weight, kind)

    made = []
    for free in (0, 8 * GIB):
        monkeypatch.setattr(decoding, "free_memory", lambda device, free=free: free)
        monkeypatch.setattr(gguf_linears, "decode", counted)
        engine = load(wide_gguf_file(kind).path, cpu_step="pytorch")
        calls.clear()
        made.append([(one.tokens, one.log_probs) for one in run(engine, requests).values()])
        assert bool(calls) == (free == 0), "blocks are decoded while requests run"
    assert made[0] == made[1]
    [seldom, once] = [one for one in caplog.records if "linears are decoded" in one.message]
    assert (seldom.levelname, once.levelname) == ("WARNING", "INFO")
    assert "are decoded in each step, which takes several times as long" in seldom.message


def test_what_latent_attention_multiplies_by_is_decoded_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product takes it, not even an FP8 one: it is multiplied head by head."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decoding, "free_memory", lambda device: 0)
    special = {"num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 32, "kv_lora_rank": 32}
    for kind, dtype, other in (
        ("fp8 by blocks", "float32", QuantizedLinear),
        ("fp8 by tensors", "bfloat16", nn.Module),
    ):
        scorer = Scorer(published(kind, "DeepseekV3", **special).directory, dtype, device="cpu")
        expected = scorer.logits(TOKENS[:20])
        prepare.prepare_weights(scorer.model, CUDA, lambda free: 0)
        layer = scorer.model.model.layers[1].self_attn
        assert isinstance(layer.kv_b_proj, DecodedLinear)
        assert isinstance(layer.o_proj, other)
        if dtype == "float32":
            assert torch.equal(scorer.logits(TOKENS[:20]), expected)


def test_a_power_of_two_is_exact() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    assert decode_e8m0(exponents).tolist() == [2.0 ** (exponent - 127) for exponent in range(255)]
