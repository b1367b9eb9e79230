"""Captured decode steps: their books, with a graph that computes again what it captured, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.attention.triton_backend import HEADER, BlockTables, StepLayout
from inflight.engine.cuda.forward import CudaForward, DecodeGraphs, batch_sizes
from inflight.engine.cuda.layers import fuse_layers
from inflight.engine.kvcache.blocks import Blocks
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.model_runner import ModelRunner
from inflight.engine.transfer import TokenIds
from tests.engine.support.checkpoints import checkpoint as made
from tests.engine.support.checkpoints import greedy
from tests.engine.support.driving import ask, fill, load, run

CPU = torch.device("cpu")


class Rerun:
    """In place of a CUDA graph: computes again, from the same inputs."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute, self.replays = compute, 0
        compute()

    def __call__(self) -> Tensor:
        self.replays += 1
        return self._compute()


def test_at_most_a_third_of_a_step_is_padding() -> None:
    for largest in (1, 2, 3, 5, 32, 48, 100, 256):
        sizes = batch_sizes(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for count in range(1, largest + 1):
            size = next(size for size in sizes if size >= count)
            assert size - count <= size / 3


def _seen() -> tuple[DecodeGraphs, list[tuple[list[int], StepLayout]], list[Rerun]]:
    """Return graphs of up to four sequences, and what their forwards were called with."""
    calls: list[tuple[list[int], StepLayout]] = []
    captured: list[Rerun] = []

    def forward(tokens: Tensor, layout: StepLayout) -> Tensor:
        calls.append((tokens.tolist(), layout))
        return tokens[:, None].float()

    def capture(compute: Callable[[], Tensor]) -> Rerun:
        captured.append(Rerun(compute))
        return captured[-1]

    return DecodeGraphs(forward, BlockTables(4, 8, 4, CPU), capture), calls, captured


def test_a_step_goes_into_the_inputs_and_padding_is_nobody() -> None:
    graphs, calls, captured = _seen()
    assert [len(tokens) for tokens, _ in calls] == [4, 2, 1]
    ranges = [QueryRange(0, 9, 1, [7, 3, 5]), QueryRange(1, 4, 1, [2, 6]), QueryRange(2, 0, 1, [1])]
    graphs(TokenIds([50, 60, 70]), ranges)
    hidden = graphs(TokenIds([51, 61, 71]), ranges)
    assert hidden is not None
    assert hidden[:, 0].tolist() == [51, 61, 71]
    hidden = graphs(TokenIds([52, 62]), ranges[:2])
    assert hidden is not None
    assert hidden[:, 0].tolist() == [52, 62]
    assert [one.replays for one in captured] == [2, 1, 0]
    tokens, layout = calls[0]
    graphs(TokenIds([1, 2, 3, 4]), [*ranges, QueryRange(3, 1, 1, [9])])
    graphs(TokenIds([1, 2, 3]), ranges)
    assert layout.positions[:3].tolist() == [9, 4, 0]
    assert layout.slots.tolist() == [5 * 4 + 1, 6 * 4, 4, -1]
    assert layout.ranges[:3, :3].tolist() == [[0, 9, 1], [1, 4, 1], [2, 0, 1]]
    assert layout.ranges[0, 3:6].tolist() == [7, 3, 5]
    assert tokens == [0, 0, 0, 0], "what was captured was captured without a step"


def test_tokens_that_only_the_device_has_stay_there() -> None:
    graphs, calls, _ = _seen()
    ranges = [QueryRange(0, 9, 1, [7, 3, 5]), QueryRange(1, 4, 1, [2, 6])]
    hidden = graphs(TokenIds([0, 0], torch.tensor([50, 60]), (0, 1)), ranges)
    assert hidden is not None
    assert hidden[:, 0].tolist() == [50, 60]
    assert calls[-1][1].positions.tolist() == [9, 4]
    ids = TokenIds([0, 7, 8, 0], torch.tensor([50, 60]), (0, 3))
    mixed = [ranges[0], QueryRange(1, 2, 2, [4]), QueryRange(3, 4, 1, [2, 6])]
    tokens, layout = StepLayout.of(ids, mixed, BlockTables(4, 8, 4, CPU))
    assert (tokens.tolist(), tokens.dtype) == ([50, 7, 8, 60], torch.int32)
    assert layout.slots.tolist() == [5 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 6 * 4]
    assert (layout.short.tolist(), layout.chunks.tolist(), layout.longest_short) == ([0, 1, 2], [], 2)


def test_a_step_sends_what_is_new_in_the_tables() -> None:
    """And a row that somebody else had is sent whole, as is one of which a block was replaced."""
    tables = BlockTables(2, 5, 4, CPU)

    def sent(*ranges: QueryRange) -> int:
        step = tables.indices(ranges)
        tables.send(TokenIds([]), step, np.zeros(0, np.int64))
        for row, query_range in zip(step.rows, ranges, strict=True):
            known = tables.tensor[row].tolist()
            assert known[:HEADER] == [query_range.first, query_range.start, query_range.count]
            assert known[HEADER : HEADER + len(query_range.blocks)] == list(query_range.blocks)
        return len(step.changed) - HEADER * len(ranges)

    first, second = Blocks([7, 3, 5]), Blocks([2])
    assert sent(QueryRange(0, 9, 1, first), QueryRange(1, 0, 3, second)) == 4
    assert sent(QueryRange(0, 10, 1, first), QueryRange(1, 3, 1, second)) == 0
    first.append(9)
    assert sent(QueryRange(0, 11, 1, first)) == 1
    first[1] = 8
    assert sent(QueryRange(0, 12, 1, first)) == 4
    third = Blocks([4, 6])
    assert sent(QueryRange(0, 4, 1, third)) == 2, "the row is that of the second, which was not used for longest"
    assert sent(QueryRange(0, 12, 1, first), QueryRange(1, 4, 1, third)) == 0
    assert sent(QueryRange(0, 4, 1, second)) == 1
    tables.forget()
    assert sent(QueryRange(0, 12, 1, first)) == 4


def test_forks_of_a_table_have_rows_of_their_own() -> None:
    cache = KvCacheManager(8, 4)
    table = fill(cache, list(range(6)))
    fork = cache.fork(table)
    replaced = table.blocks.replaced
    assert cache.grow(table, 7)
    assert table.blocks[:1] == fork.blocks[:1]
    assert table.blocks[1] != fork.blocks[1]
    assert table.blocks.replaced > replaced, "whoever has a copy of the table is told"
    assert type(fork.blocks) is Blocks


def test_what_is_no_decode_step_is_left_to_others() -> None:
    graphs, _, captured = _seen()
    assert graphs(TokenIds([1, 2]), [QueryRange(0, 0, 2, [0])]) is None
    assert graphs(TokenIds([1] * 5), [QueryRange(row, 0, 1, [row]) for row in range(5)]) is None
    assert not any(one.replays for one in captured)


@pytest.mark.sweep(most=2)
@pytest.mark.proof
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ["llama, biases, tied", "gemma3"])
def test_tokens_are_those_of_transformers(name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", ahead)
    prompts = [(5, 6, 7, 8, 9, 10, 11, 12, 13, 14), (3,), (20, 30, 40)]
    engine = load(made(name), cpu_step="pytorch", num_blocks=24, max_batch_size=3, max_tokens_per_step=6)
    runner = engine._runner
    fuse_layers(runner._model)
    runner._kernels = CudaForward(runner._model, runner._kv_pool, 4, 3, 96)
    captured: list[Rerun] = []

    def capture(compute: Callable[[], Tensor]) -> Rerun:
        captured.append(Rerun(compute))
        return captured[-1]

    with torch.inference_mode():
        runner._kernels.graphs = DecodeGraphs(runner._kernels.run, runner._kernels.tables, capture)
    requests = [ask(prompt, max_tokens=4) for prompt in prompts]
    outputs = run(engine, requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert outputs[request.key].tokens == greedy(name, prompt, 4)
    assert sum(one.replays for one in captured) >= 3
    assert bool(engine._overlap and engine._overlap.launches) == ahead
