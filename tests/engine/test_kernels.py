"""The Triton kernels, run by Triton's interpreter, against plain PyTorch.

Tolerances are of sums in another order: two millionths of values of order one in float32, and the last bits of the type
in float16, where weights are rounded before they are summed. The interpreter cannot multiply bfloat16: tests/gpu does.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from inflight.engine.attention import plan as plan_module
from inflight.engine.attention import triton_kernels
from inflight.engine.attention.plan import AttentionPlan, Card, Tile, plan
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.attention.triton_backend import BlockTables, StepLayout, TritonAttention
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.transfer import TokenIds
from tests.engine.support.paged_steps import (
    BLOCKS,
    CPU,
    MIXED,
    activations,
    both,
    filled,
    kernels_see,
    ranges_of,
    shape,
)

SHORT = 12
"""Tokens of the longest query range that takes the tile of rows of a token alone."""
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # numpy's; a GPU says nothing


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window"),
    [(4, 4, 16, 16, None), (4, 2, 64, 24, 8), (7, 1, 24, 16, 8), (6, 2, 80, 64, 40), (2, 1, 256, 16, None)],
)
def test_equal_to_the_reference(heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None) -> None:
    seen, expected = both(shape(heads, kv_heads, head_dim), MIXED, block_size=block_size, window=window)
    torch.testing.assert_close(seen, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["", "int8"])
@pytest.mark.parametrize(("softcap", "sinks", "window"), [(30.0, True, None), (0.7, False, None), (None, True, 20)])
def test_soft_caps_and_sinks(softcap: float | None, sinks: bool, window: int | None, kind: str) -> None:
    """Of a token whose keys are divided among programs, and of a chunk."""
    lengths = [(70, 1), (3, SHORT + 1)]
    seen, expected = both(shape(4, 2, 16), lengths, window=window, kind=kind, softcap=softcap, sinks=sinks)
    tolerance = 1e-5 if kind else 3e-6
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)


def test_blocks_of_one_token() -> None:
    seen, expected = both(shape(4, 2, 32), [(9, 1), (3, 8), (0, 15)], block_size=1)
    torch.testing.assert_close(seen, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["", "fp8", "int8"])
def test_float16(kind: str) -> None:
    seen, expected = both(shape(4, 2, 32), MIXED, dtype=torch.float16, kind=kind)
    torch.testing.assert_close(seen, expected, rtol=4e-3, atol=4e-3)


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_quantized_cache_in_float32(kind: str) -> None:
    seen, expected = both(shape(4, 2, 32), MIXED, kind=kind, window=50)
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def _sizes_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long for parts that are not there, and as long for each token: few make a chunk of a prompt here."""
    monkeypatch.setattr(triton_kernels, "_UNROLLED", 2)
    monkeypatch.setattr(plan_module, "LONGEST_SHORT", SHORT)


@pytest.mark.proof
@pytest.mark.usefixtures("rows_are_multiplied_alike")
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_sees_the_same_whatever_its_chunk_and_its_neighbours(window: int | None) -> None:
    config, dtype = shape(6, 2, 32), torch.float16
    whole = ranges_of([(70, 2 * SHORT), (200, 1), (3, 1)], 16)
    query, key, value = activations(config, whole, dtype, CPU)

    def step(tensors: object, ranges: list, rows: slice) -> torch.Tensor:
        parts = (query[rows], key[rows], value[rows])
        return kernels_see(tensors, ranges, 16, 0, *parts, AttentionOptions(config.attention_scale, window))

    together = step(filled(config, whole, 16, dtype, "", CPU), whole, slice(None))
    alone, first = filled(config, whole, 16, dtype, "", CPU), whole[0]
    parts = []
    for start, count in ((70, 7), (77, SHORT + 1), (90, 4)):
        ranges = [type(first)(0, start, count, first.blocks)]
        parts.append(step(alone, ranges, slice(start - 70, start - 70 + count)))
    for query_range in whole[1:]:
        ranges = [type(query_range)(0, query_range.start, 1, query_range.blocks)]
        parts.append(step(alone, ranges, slice(query_range.first, query_range.first + 1)))
    assert torch.equal(torch.cat(parts), together)


@pytest.mark.sweep(most=2)
@pytest.mark.proof
@pytest.mark.usefixtures("rows_are_multiplied_alike")
@pytest.mark.parametrize(
    ("context", "dtype"),
    [
        (100, torch.float16),
        (260, torch.float16),
        (260, torch.bfloat16),
        (260, torch.float32),
        (420, torch.float32),  # whose rounding hides no other order of sums
    ],
)
def test_a_token_sees_the_same_alone_checked_and_in_a_chunk(
    context: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, last, drafts = shape(3, 1, 16), SHORT + 1, 5
    whole = ranges_of([(context - last, last + 1)], 64)
    query, key, value = activations(config, whole, dtype, CPU)

    def seen(*counts: int, processors: int = 4, one_tile: bool = False) -> torch.Tensor:
        """Return what the tokens see, so many of them in each step."""
        monkeypatch.setattr(plan_module, "card_of", lambda _: Card(90, processors))
        tensors, parts, start = filled(config, whole, 64, dtype, "", CPU), [], 0
        for count in counts:
            ranges, rows = [QueryRange(0, whole[0].start + start, count, whole[0].blocks)], slice(start, start + count)
            step = (0, query[rows], key[rows], value[rows], AttentionOptions(config.attention_scale))
            parts.append(kernels_see(tensors, ranges, 64, *step, one_tile=one_tile))
            start += count
        return torch.cat(parts)

    together = seen(last + 1)
    assert together.isfinite().all()
    assert torch.equal(seen(last, 1, processors=1), together), "the keys of one program"
    assert torch.equal(seen(last - drafts, drafts, 1, processors=20), together), "keys divided among programs"
    if context == 260:
        assert torch.equal(seen(last, 1, one_tile=True), together)


@pytest.mark.proof
@pytest.mark.usefixtures("rows_are_multiplied_alike")
@pytest.mark.parametrize(("window", "room"), [(None, 16), (300, 8)])
def test_keys_are_divided_among_programs_as_there_is_room(
    window: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ranges = shape(3, 1, 16), ranges_of([(900, 1), (70, 2), (640, 3), (3, 1)], 64)
    step = (0, *activations(config, ranges, torch.float16, CPU), AttentionOptions(config.attention_scale, window))
    plans: list[AttentionPlan] = []

    def attend(*arguments: Any) -> None:
        plans.append(arguments[4])
        launched(*arguments)

    launched = triton_kernels.attend
    monkeypatch.setattr(triton_kernels, "attend", attend)
    monkeypatch.setattr(plan_module, "card_of", lambda _: Card(90, 2))
    part, results = 4 * 16 * (config.head_dim + 4), []
    for bytes_ in (triton_kernels._PART_BYTES, room * part, 0):
        monkeypatch.setattr(triton_kernels, "_PART_BYTES", bytes_)
        results.append(kernels_see(filled(config, ranges, 64, torch.float16, "", CPU), ranges, 64, *step))
    divided = [(plan.bases >= 0).tolist() for plan in plans]
    assert divided == [[True, False, True, False], [True, False, False, False], [False] * 4]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.proof
def test_every_tile_is_seen_once_by_programs_that_have_equal_shares() -> None:
    rng = random.Random(5)
    for sequences in (1, 9, 9, 140):
        lengths = [(rng.choice((0, 5, 700, 5000)), rng.choice((1, 1, 3, 20))) for _ in range(sequences)]
        table = torch.tensor([(0, *length) for length in lengths], dtype=torch.int32)
        members, tile = torch.arange(len(lengths), dtype=torch.int32), Tile(16, 64, 4, 2)
        shares, window = rng.choice((1, 30)), rng.choice((None, 1000))
        made = plan(table, members, 20, tile, 3, window, shares, 10**6)
        work, parts = Counter[tuple[int, int, int]](), Counter[int]()
        units = [unit for unit in made.units[:, :5].tolist() if unit[0] >= 0]
        for query_range, first_row, begin, stop, slot in units:
            work.update((query_range, first_row, key_tile) for key_tile in range(begin, stop))
            parts.update(range(slot, slot + stop - begin) if slot >= 0 else ())
        expected = Counter(
            (query_range, first_row, key_tile)
            for query_range, (start, count) in enumerate(lengths)
            for first_row in range(0, count * 3, 16)
            for key_tile in range(max(start - window + 1, 0) // 64 if window else 0, -(-(start + count) // 64))
        )
        assert work == expected
        assert set(parts.values()) <= {1}
        share = max(1, -(-expected.total() // shares))
        assert all(stop - begin <= share for _, _, begin, stop, _ in units)
        assert {(query_range, row) for query_range, row, *_ in units} >= {
            (query_range, 0) for query_range in range(len(lengths))
        }


@pytest.mark.proof
def test_heads_far_apart_are_found() -> None:
    """A cache of many gigabytes, of which only a few pages are there."""
    config, ranges = shape(3, 3, 16), ranges_of([(30, 1), (9, SHORT + 2)], 16)
    near = filled(config, ranges, 16, torch.float32, "int8", CPU)
    step = (0, *activations(config, ranges, torch.float32, CPU, "int8"), AttentionOptions(config.attention_scale))
    expected = kernels_see(near, ranges, 16, *step)
    stride, (heads, slots, dim) = 2**30, near.layers[0].keys.shape
    memory = torch.empty(2**31 + heads * stride, dtype=torch.int8)
    layer = near.layers[0]
    keys, values = (memory.as_strided((heads, slots, dim), (stride, dim, 1), 2**31 + at) for at in (0, slots * dim))
    keys.copy_(layer.keys)
    values.copy_(layer.values)
    _, layout = StepLayout.of(TokenIds([0] * (SHORT + 3)), ranges, BlockTables(2, BLOCKS, 16, CPU))
    far = replace(layer, keys=keys, values=values)
    assert torch.equal(TritonAttention([far], layout, 16)(*step), expected)
