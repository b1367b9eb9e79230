"""The kernels between matrix products, by Triton's interpreter, against the layers that they take the place of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from inflight.engine.attention.store import HeadNorms, Turn, form_of, rotate_and_store, store
from inflight.engine.cuda.elementwise import FusedRmsNorm, FusedSum, Residual, gate
from inflight.engine.cuda.fp8 import quantize
from inflight.engine.cuda.layers import RotaryTable
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models import rope
from inflight.engine.models.layers import Activation, GemmaRmsNorm, RmsNorm, WideRmsNorm
from inflight.engine.quant.formats import to_int8
from tests.engine.support.paged_steps import halfway

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's; a GPU says nothing
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),
]

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
SCALE = torch.tensor(2.0**-6)


def _norm(kind: type[RmsNorm], size: int, dtype: torch.dtype) -> RmsNorm:
    norm = kind(size, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.normal_()
    return norm


@DTYPES
@pytest.mark.parametrize("kind", [RmsNorm, GemmaRmsNorm, WideRmsNorm])
def test_norms(kind: type[RmsNorm], dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm, behind = _norm(kind, 24, dtype), _norm(kind, 24, dtype)
    close: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    x, delta = torch.randn(2, 5, 24, dtype=dtype)
    torch.testing.assert_close(FusedRmsNorm(norm)(x), norm(x), **close)
    for gain, added in ((None, delta), (behind.weight, behind(delta))):
        total = x.clone()
        seen = FusedRmsNorm(norm)(Residual(total, delta, gain))
        torch.testing.assert_close(total, x + added, **close)
        torch.testing.assert_close(seen, norm(x + added), rtol=4 * tolerance, atol=4 * tolerance)
        if gain is None:
            assert torch.equal(total, x + added), "the residual is another"


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(gelu: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(2)
    x = (3 * torch.randn(3, 2 * 1100)).to(dtype)
    torch.testing.assert_close(gate(x, gelu), Activation(gelu)(x), rtol=4 * tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_an_fp8_product_takes_is_what_it_would_make_of_it(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, delta = torch.randn(2, 4, 48, dtype=dtype)
    norm, wide = _norm(RmsNorm, 48, dtype), (3 * torch.randn(4, 96)).to(dtype)
    pairs = (
        (FusedRmsNorm(norm, SCALE)(x), FusedRmsNorm(norm)(x)),
        (FusedRmsNorm(norm, SCALE)(Residual(x.clone(), delta, None)), FusedRmsNorm(norm)(Residual(x, delta, None))),
        (gate(wide, gelu=False, scale=SCALE), gate(wide, gelu=False)),
    )
    for quantized, plain in pairs:
        assert quantized.dtype == torch.float8_e4m3fn
        assert torch.equal(quantized.view(torch.uint8), quantize(plain, SCALE).view(torch.uint8))


def _cache(kv_heads: int, dim: int, dtype: torch.dtype) -> StoredKv:
    """Return a layer's cache of eight slots that are no number yet."""
    scales = torch.full((kv_heads, 8), 2.0**-5, dtype=torch.bfloat16 if dtype == torch.int8 else torch.float32)
    keys, values = (torch.zeros(kv_heads, 8, dim).to(dtype) for _ in range(2))
    return StoredKv(keys, values, scales, scales.clone())


def _heads(dtype: torch.dtype, dim: int = 24) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return five tokens' heads, of which twenty are queries and eighteen keys and values, and their rotation."""
    torch.manual_seed(1)
    positions = torch.tensor([3, 0, 6, 1, 6], dtype=torch.int32)
    angles = torch.rand(7, dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    return torch.randn(5, 20 + 2 * 18, 24, dtype=dtype), (table, positions)


SLOTS = torch.tensor([4, 1, -1, 7, 0], dtype=torch.int32)


@pytest.mark.sweep
@DTYPES
@pytest.mark.parametrize("dim", [24, 16])
@pytest.mark.parametrize("kind", [None, RmsNorm, GemmaRmsNorm])
def test_rotating_and_storing(kind: type[RmsNorm] | None, dim: int, dtype: torch.dtype, tolerance: float) -> None:
    heads, (table, positions) = _heads(dtype, dim)
    cache, norms = _cache(18, 24, dtype), HeadNorms()
    query, key, value = heads.split((20, 18, 18), 1)
    if kind is not None:
        q_norm, k_norm = _norm(kind, 24, dtype), _norm(kind, 24, dtype)
        norms = HeadNorms(q_norm.weight, k_norm.weight, 1e-5, form_of(q_norm))
        query, key = q_norm(query), k_norm(key)
    seen = rotate_and_store(heads, Turn((table, positions)), SLOTS, cache, norms)
    cos, sin = table[positions.long(), None].split(dim // 2, -1)
    angles = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    close: dict[str, Any] = {"rtol": 4 * tolerance, "atol": 4 * tolerance}
    torch.testing.assert_close(seen, rope.rotate(query, *angles), **close)
    rotated = rope.rotate(key, *angles)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            torch.testing.assert_close(cache.keys[:, slot], rotated[token], **close)
            assert torch.equal(cache.values[:, slot], value[token])
    untouched = [slot for slot in range(8) if slot not in SLOTS]
    assert not cache.keys[:, untouched].any()
    assert not cache.values[:, untouched].any()


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_stored_is_quantized_as_it_would_be_alone(dtype: torch.dtype, stored: torch.dtype) -> None:
    heads, rotation = _heads(dtype)
    plain, alone, together = _cache(18, 24, dtype), _cache(18, 24, stored), _cache(18, 24, stored)
    rotate_and_store(heads, Turn(rotation), torch.arange(5, dtype=torch.int32), plain, HeadNorms())
    rotate_and_store(heads, Turn(rotation), SLOTS, together, HeadNorms())
    store(plain.keys[:, :5].transpose(0, 1), plain.values[:, :5].transpose(0, 1), SLOTS, alone)
    for name in ("keys", "values", "key_scales", "value_scales"):
        one, other = getattr(alone, name), getattr(together, name)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.proof
def test_quotients_halfway_between_two_integers_go_to_the_even_one() -> None:
    rows = halfway()
    cache = StoredKv(
        *torch.zeros(2, 1, len(rows), 256, dtype=torch.int8), *torch.zeros(2, 1, len(rows), dtype=torch.bfloat16)
    )
    store(rows[:, None], rows[:, None], torch.arange(len(rows), dtype=torch.int32), cache)
    values, scales = to_int8(rows)
    assert torch.equal(cache.keys[0], values)
    assert torch.equal(cache.key_scales[0], scales[:, 0])


def test_a_layer_s_cache_may_be_larger_than_32_bits_reach() -> None:
    stride, count = 1 << 30, 4  # elements from head to head: in 32 bits, the last two heads would come before the first
    memory = torch.empty(
        (count + 1) * stride + 64, dtype=torch.float8_e4m3fn
    )  # only pages that are stored to are touched
    keys, values = (memory[2 * stride + start :].as_strided((count, 2, 16), (stride, 16, 1)) for start in (0, 32))
    ones = torch.ones(()).expand(count, 2)
    key, value = torch.arange(2.0 * count * 16).view(2, 1, count, 16).to(torch.float8_e4m3fn).float()
    store(key, value, torch.tensor([1], dtype=torch.int32), StoredKv(keys, values, ones, ones))
    assert torch.equal(keys[:, 1].float(), key[0])
    assert torch.equal(values[:, 1].float(), value[0])


def test_a_position_beyond_the_table_reads_none_of_other_memory() -> None:
    heads, (table, _) = _heads(torch.float32)
    last, beyond = (torch.full((5,), position, dtype=torch.int32) for position in (6, 7000))
    turns = [Turn((table, at)) for at in (last, beyond)]
    seen = [rotate_and_store(heads, turn, SLOTS, _cache(18, 24, torch.float32), HeadNorms()) for turn in turns]
    assert torch.equal(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0 + place for place in range(8)],
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: "-".join(str(value) for value in scaling.values())[:20],
)
def test_the_table_has_what_each_step_would_compute(
    scaling: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.engine.cuda.layers._POSITIONS", 100)
    embedding = rope.RotaryEmbedding({"rope_theta": 1e4} | scaling, 16, 256, served_length=256)
    positions = torch.tensor([0, 7, 63, 64, 99, 100, 255])
    table, same = RotaryTable(embedding, dtype, torch.device("cpu"))(positions, dtype)
    assert same is positions
    cos, sin = embedding(positions, dtype)
    half = embedding.dim // 2
    assert table.shape == (256, embedding.dim)
    assert torch.equal(table[positions, :half], cos[:, 0, :half])
    assert torch.equal(table[positions, half:], sin[:, 0, half:])


@pytest.mark.sweep
@DTYPES
@pytest.mark.parametrize("how", ["interleaved", "as one", "not at all", "scaled"])
def test_other_ways_to_turn_and_normalize(how: str, dtype: torch.dtype, tolerance: float) -> None:
    heads, (table, positions) = _heads(dtype, 16)
    query, key, _ = heads.split((20, 18, 18), 1)
    cache, norms, turn = _cache(18, 24, dtype), HeadNorms(), Turn((table, positions))
    cos, sin = table[positions.long(), None].split(8, -1)
    angles = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    if how == "as one":
        q_norm, k_norm = _norm(WideRmsNorm, 20 * 24, dtype), _norm(WideRmsNorm, 18 * 24, dtype)
        norms = HeadNorms(q_norm.weight, k_norm.weight, 1e-5, form_of(q_norm), as_one=True)
        query, key = q_norm(query.flatten(1)).view(query.shape), k_norm(key.flatten(1)).view(key.shape)
    if how == "not at all":
        turn = Turn()
    else:
        query, key = (rope.rotate(part, *angles, how == "interleaved") for part in (query, key))
    if how == "interleaved":
        turn = Turn((table, positions), interleaved=True)
    if how == "scaled":
        scale = torch.linspace(0.5, 2, 5)[:, None, None]
        turn, query = Turn((table, positions), query_scale=scale), (query * scale).to(dtype)
    seen = rotate_and_store(heads, turn, SLOTS, cache, norms)
    close: dict[str, Any] = {"rtol": 4 * tolerance, "atol": 4 * tolerance}
    torch.testing.assert_close(seen, query, **close)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            torch.testing.assert_close(cache.keys[:, slot], key[token], **close)


@pytest.mark.proof
def test_interleaved_heads_are_quantized_as_any() -> None:
    heads, rotation = _heads(torch.float32, 16)
    for stored in (torch.int8, torch.float8_e4m3fn):
        plain, alone, together = _cache(18, 24, torch.float32), _cache(18, 24, stored), _cache(18, 24, stored)
        for cache, slots in ((plain, torch.arange(5, dtype=torch.int32)), (together, SLOTS)):
            rotate_and_store(heads, Turn(rotation, interleaved=True), slots, cache, HeadNorms())
        store(plain.keys[:, :5].transpose(0, 1), plain.values[:, :5].transpose(0, 1), SLOTS, alone)
        assert torch.equal(alone.keys.view(torch.uint8), together.keys.view(torch.uint8))


@DTYPES
def test_a_sum_without_a_norm_in_front(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(4)
    behind = _norm(WideRmsNorm, 24, dtype)
    x, delta = torch.randn(2, 5, 24, dtype=dtype)
    assert FusedSum(behind)(x) is x
    total = x.clone()
    seen = FusedSum(behind)(Residual(total, delta, behind.weight))
    torch.testing.assert_close(seen, x + behind(delta), rtol=tolerance, atol=tolerance)
    assert torch.equal(total, seen)
    quantized = FusedSum(behind, SCALE)(Residual(x.clone(), delta, behind.weight))
    assert torch.equal(quantized.view(torch.uint8), quantize(seen, SCALE).view(torch.uint8))
