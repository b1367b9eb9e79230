"""One attention step by the kernels at any size, and what plain PyTorch makes of it in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.checkpoints import Shape
from benchmarks.random_weights import config_of
from inflight.engine.attention.torch_backend import QueryRange
from inflight.engine.attention.triton_backend import BlockTables, StepLayout, TritonAttention
from inflight.engine.kvcache.memory_pool import Fp8KvPool, Int8KvPool, KvPool, KvScales
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.models.reading import read_model_config
from inflight.engine.transfer import TokenIds

BLOCK_SIZE = 16
_FILLED_AT_ONCE = 1 << 16
_CHECKED_ROWS = 96
"""Tokens of a chunk that are held to the reference: the first, the last, and some at random."""


@dataclass(frozen=True)
class AttentionStep:
    """A cache with the context of some query ranges, and queries, keys and values of their tokens."""

    config: ModelConfig
    tensors: KvPool
    ranges: list[QueryRange]
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def make(
        cls, shape: Shape, lengths: Sequence[tuple[int, int]], kind: str, dtype: torch.dtype, device: torch.device
    ) -> AttentionStep:
        """
        Args:
            shape: its heads are used; there is one layer.
            lengths: of each query range the start and the count.
            kind: of the cache: fp8, int8, or empty for that of the computation.
            dtype: of the computation.
            device: where all lies.
        """
        config = read_model_config(config_of(replace(shape, layers=1)))
        ranges, num_blocks = _ranges(lengths)
        tensors = _cache(config, kind, num_blocks, dtype, device)
        generator = torch.Generator(device).manual_seed(0)
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        for first in range(0, num_blocks * BLOCK_SIZE, _FILLED_AT_ONCE):
            slots = torch.arange(first, min(first + _FILLED_AT_ONCE, num_blocks * BLOCK_SIZE), device=device)
            size = (2, len(slots), config.num_kv_heads, config.head_dim)
            tensors.write(0, slots, *torch.randn(size, generator=generator, device=device).to(dtype))
        tokens = ranges[-1].first + ranges[-1].count
        new = torch.randn(tokens, sum(heads), config.head_dim, generator=generator, device=device).to(dtype)
        return cls(config, tensors, ranges, *new.split(heads, 1))

    def seen(self, ranges: list[QueryRange] | None = None, rows: slice = slice(None)) -> Tensor:
        """Return what the kernels see: of all query ranges, or of others that have these rows of the tokens."""
        return self.planned(ranges, rows)()

    def planned(self, ranges: list[QueryRange] | None = None, rows: slice = slice(None)) -> Callable[[], Tensor]:
        """Return a function that stores and attends as one layer of a step does.

        Its first run makes the step's plan, which later runs keep.
        """
        parts = (self.query[rows], self.key[rows], self.value[rows])
        ranges = ranges or self.ranges
        widest = max(len(query_range.blocks) for query_range in ranges)
        tables = BlockTables(len(ranges), widest, BLOCK_SIZE, self.query.device)
        _, layout = StepLayout.of(TokenIds([0] * len(parts[0])), ranges, tables)
        attend = TritonAttention([self.tensors.layers[0]], layout, BLOCK_SIZE)
        return functools.partial(attend, 0, *parts, AttentionOptions(self.config.attention_scale))

    def error(self, seen: Tensor) -> float:
        """Return the norm of what is wrong with ``seen``, as a share of what is right; of some tokens of each chunk."""
        wrong, right = 0.0, 0.0
        for query_range in self.ranges:
            places = _checked(query_range.count)
            rows = torch.as_tensor(places, device=seen.device)
            expected = self._expected(query_range, rows)
            found = seen[query_range.first + rows].double()
            wrong += float((found - expected).square().sum())
            right += float(expected.square().sum())
        return float((wrong / right) ** 0.5) if torch.isfinite(seen).all() else float("nan")

    def _expected(self, query_range: QueryRange, rows: Tensor) -> Tensor:
        """Return what tokens of a query range see of what is stored, in float64 ``[rows, heads, head_dim]``."""
        config, device = self.config, self.query.device
        places = torch.arange(query_range.start + query_range.count, device=device)
        slots = (
            torch.tensor(list(query_range.blocks), device=device)[places // BLOCK_SIZE] * BLOCK_SIZE
            + places % BLOCK_SIZE
        )
        keys, values = (part.double() for part in self.tensors.read(0, slots))
        query = self.query[query_range.first + rows].double().unflatten(1, (config.num_kv_heads, -1))
        scores = torch.einsum("rkgd,ksd->kgrs", query, keys) * config.attention_scale
        hidden = places[None, :] > query_range.start + rows[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("kgrs,ksd->rkgd", weights, values).flatten(1, 2)


@contextmanager
def poisoned() -> Iterator[None]:
    """Have memory that is taken hold NaN: what a kernel leaves out cannot look right by chance."""
    empty, empty_like = torch.empty, torch.empty_like

    def spoil(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan) if tensor.dtype.is_floating_point and tensor.itemsize > 1 else tensor

    with (
        mock.patch.object(torch, "empty", lambda *size, **more: spoil(empty(*size, **more))),
        mock.patch.object(torch, "empty_like", lambda *like, **more: spoil(empty_like(*like, **more))),
    ):
        yield


def _ranges(lengths: Sequence[tuple[int, int]]) -> tuple[list[QueryRange], int]:
    """Return query ranges with blocks dealt out at random, and how many blocks there are."""
    widths = [-(-(start + count) // BLOCK_SIZE) for start, count in lengths]
    dealt = np.random.default_rng(0).permutation(sum(widths)).tolist()
    ranges, first = [], 0
    for (start, count), width in zip(lengths, widths, strict=True):
        ranges.append(QueryRange(first, start, count, [dealt.pop() for _ in range(width)]))
        first += count
    return ranges, sum(widths)


def _cache(config: ModelConfig, kind: str, blocks: int, dtype: torch.dtype, device: torch.device) -> KvPool:
    if kind == "int8":
        return Int8KvPool(config, blocks, BLOCK_SIZE, dtype, device)
    if kind == "fp8":
        scales = KvScales(torch.full((1,), 2.0**-5, device=device), torch.full((1,), 2.0**-6, device=device))
        return Fp8KvPool(config, blocks, BLOCK_SIZE, dtype, device, scales)
    return KvPool(config, blocks, BLOCK_SIZE, dtype, device)


def _checked(count: int) -> list[int]:
    if count <= _CHECKED_ROWS:
        return list(range(count))
    some = np.random.default_rng(1).choice(count, _CHECKED_ROWS, replace=False).tolist()
    return sorted({0, count - 1, *some})
