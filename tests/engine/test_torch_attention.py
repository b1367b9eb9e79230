"""Attention row by row, and packed linears: right, and the same to the last bit whatever else is in the batch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.attention.torch_backend import (
    DecodeAttention,
    GatherDecodeAttention,
    QueryRange,
    SlotWindow,
    SparseDecodeAttention,
    TorchAttention,
    length_buckets,
)
from inflight.engine.checkpoint import load_config
from inflight.engine.kvcache.memory_pool import KvPool
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.models.packed import PackedLinear, has_bfloat16_products, pack_linears
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, load, run

LENGTHS = [1, 2, 15, 16, 17, 40, 33, 7]
BLOCK_SIZE, BLOCKS = 4, 200
SCALE = 0.3
BFLOAT16 = (torch.bfloat16, 2**-7)
"""With its rounding."""
has_bfloat16 = pytest.mark.skipif(not has_bfloat16_products(), reason="no instructions for bfloat16")
has_no_tiles = pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="AMX adds up by the number of rows")
each_kind = pytest.mark.parametrize("kind", [SparseDecodeAttention, GatherDecodeAttention])


def _tensors() -> KvPool:
    kv = KvPool(load_config(checkpoint("llama")), BLOCKS, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    kv.parts[0].normal_(generator=generator)
    kv.parts[1].normal_(generator=generator)
    return kv


def _slots(kv: KvPool, lengths: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[: max(lengths)] for _ in lengths])


def _query(kv: KvPool, rows: int, group: int) -> Tensor:
    return torch.randn(
        rows, kv.parts[0].shape[1] * group, kv.parts[0].shape[3], generator=torch.Generator().manual_seed(2)
    )


def _expected(kv: KvPool, query: Tensor, slots: Tensor, length: int, window: int | None) -> Tensor:
    """One row, by itself."""
    seen = slots[max(0, length - window) if window else 0 : length]
    group = query.shape[0] // kv.parts[0].shape[1]
    keys, values = (stored[1][:, seen].repeat_interleave(group, 0) for stored in kv.parts)
    return functional.scaled_dot_product_attention(query[:, None], keys, values, scale=SCALE)[:, 0]


@each_kind
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 8, 100])
def test_decode_attention_of_rows_of_many_lengths(
    kind: type[SparseDecodeAttention | GatherDecodeAttention], group: int, window: int | None
) -> None:
    kv = _tensors()
    slots, query = _slots(kv, LENGTHS), _query(kv, len(LENGTHS), group)
    rows: DecodeAttention = kind(kv, SlotWindow(slots, torch.tensor(LENGTHS)))
    seen = rows(1, query, AttentionOptions(SCALE, window))
    for row, length in enumerate(LENGTHS):
        expected = _expected(kv, query[row], slots[row], length, window)
        torch.testing.assert_close(seen[row], expected, atol=2e-6, rtol=2e-6)


@each_kind
def test_nan_stays_in_its_row(kind: type[SparseDecodeAttention | GatherDecodeAttention]) -> None:
    kv = _tensors()
    lengths = torch.tensor([5, 9])
    slots = torch.arange(20).view(2, 10)
    kv.parts[0][:, :, 0] = torch.nan
    rows = kind(kv, SlotWindow(slots, lengths))
    query = _query(kv, 2, 2)
    for _ in range(2):
        seen = rows(1, query, AttentionOptions(SCALE))
        assert seen[0].isnan().all()
        assert not seen[1].isnan().any()


def test_sparse_decode_attention_of_a_row_does_not_depend_on_others() -> None:
    kv = _tensors()
    slots, query = _slots(kv, LENGTHS), _query(kv, len(LENGTHS), 2)
    together = SparseDecodeAttention(kv, SlotWindow(slots, torch.tensor(LENGTHS)))(1, query, AttentionOptions(SCALE))
    for row, length in enumerate(LENGTHS):
        reach = SlotWindow(slots[row : row + 1], torch.tensor([length]))
        alone = SparseDecodeAttention(kv, reach)(1, query[row : row + 1], AttentionOptions(SCALE))
        assert torch.equal(alone[0], together[row])


def test_length_buckets() -> None:
    lengths = torch.tensor([3, 1000, 60, 90, 1100, 400, 1])
    groups = length_buckets(lengths)
    assert torch.cat(groups).sort().values.tolist() == list(range(len(lengths)))
    assert [lengths[group].tolist() for group in groups] == [[1000, 1100], [400], [3, 60, 90, 1]]


@pytest.mark.parametrize("window", [None, 6])
def test_torch_attention_of_short_and_long_chunks_agrees(window: int | None) -> None:
    """Tokens as rows, as a chunk from the cache, and as a chunk that begins its sequence."""
    blocks, tokens = list(range(30)), 40
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(tokens, 4, 16, generator=generator)
    key, value = torch.randn(2, tokens, 2, 16, generator=generator).unbind()
    seen = []
    for cuts in ([40], [20, 40], [10, 20, 30, 40], [1, 2, 40]):
        kv, parts = _tensors(), []
        for start, end in zip([0, *cuts], cuts, strict=False):
            query_range = QueryRange(0, start, end - start, blocks[: -(-end // BLOCK_SIZE)])
            attend = TorchAttention(kv, [query_range], BLOCK_SIZE)
            parts.append(attend(1, query[start:end], key[start:end], value[start:end], AttentionOptions(SCALE, window)))
        seen.append(torch.cat(parts))
    for other in seen[1:]:
        torch.testing.assert_close(seen[0], other, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("columns", "outputs"), [(192, 320), (1024, 320), (1024, 640), (1032, 320), (2048, 320), (5000, 320), (5632, 320)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), pytest.param(*BFLOAT16, marks=has_bfloat16)])
def test_packed_linear(columns: int, outputs: int, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Of a small model and of large ones: for a lone row of many columns oneDNN has an order of its own."""
    torch.manual_seed(0)
    linear = nn.Linear(columns, outputs, bias=bias, dtype=dtype)
    packed, x = PackedLinear(linear), torch.randn(70, columns, dtype=dtype)
    with torch.inference_mode():
        whole = packed(x)
        torch.testing.assert_close(whole, linear(x), atol=tolerance, rtol=tolerance)
        for count in (1, 2, 5, 16, 31, 64):
            few = packed(x[:count])
            if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
                torch.testing.assert_close(few, whole[:count], atol=tolerance, rtol=tolerance)
            else:
                assert torch.equal(few, whole[:count]), f"{count} rows"
        assert packed(x[:0]).shape == (0, outputs)


@pytest.mark.proof
def test_packed_linears_on_an_older_processor() -> None:
    """oneDNN and PyTorch compute as on a processor without AVX."""
    older = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    tests = [f"{__file__}::{name}" for name in ("test_packed_linear", "test_pack_linears")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=os.environ | older, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout


def test_pack_linears() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), nn.LayerNorm(8))
    pack_linears(model)
    half = PackedLinear if has_bfloat16_products() else nn.Linear
    assert [type(module) for module in model] == [PackedLinear, half, nn.LayerNorm]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("qwen2, windows", "float32"),
        ("gemma3, tied, linear", "float32"),
        pytest.param("llama", "bfloat16", marks=[has_bfloat16, has_no_tiles]),
    ],
)
def test_logits_do_not_depend_on_the_batch(name: str, dtype: str) -> None:
    """The same bits, alone and beside others of other lengths that come and go."""
    chance = random.Random(4)
    prompts = [[chance.randrange(1, VOCAB) for _ in range(length)] for length in (30, 5, 90, 61, 30, 12)]

    def logits(prompts: list[list[int]]) -> np.ndarray:
        requests = [
            ask(prompt, 4 + 3 * (index % 4), generation_logits=True, ignore_eos=True)
            for index, prompt in enumerate(prompts)
        ]
        settings: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": "float32"}
        outputs = run(load(checkpoint(name), max_tokens_per_step=512, prefix_reuse=False, **settings), requests)
        return np.stack(outputs[requests[0].key].generation_logits or [])

    for _ in range(len(prompts)):
        prompts.append(prompts.pop(0))
        alone, together = logits(prompts[:1]), logits(prompts)
        np.testing.assert_array_equal(alone, together)


@pytest.mark.proof
def test_steps_of_any_size_run_few_numbers_of_rows() -> None:
    """oneDNN keeps a compiled product for each; a linear meets no more numbers than there are in so many octaves."""
    engine = load(checkpoint("llama"), max_tokens_per_step=128, prefix_reuse=False, cpu_step="pytorch")
    met: dict[str, set[int]] = {}

    def note(name: str, rows: int) -> None:
        met.setdefault(name, set()).add(rows)

    for name, module in engine._runner._model.named_modules():
        if isinstance(module, PackedLinear):
            module.register_forward_pre_hook(lambda _, inputs, name=name: note(name, len(inputs[0])))
    for size in range(1, 129):
        run(engine, [ask([1] * size, 1, context_logits=True)])
    assert "lm_head" in met
    for name, rows in met.items():
        assert rows == {*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8)}, name
