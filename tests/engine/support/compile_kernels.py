"""Compiles the kernels for GPUs that are not there: what Triton and ptxas refuse, they refuse here too.

Run as a program, since a process either interprets kernels or compiles them. Prints a line for each kernel and type:
its name, the type of the computation, that of the cache, and its bytes of shared memory.
"""

from __future__ import annotations

import os
import sys
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from inflight.engine.attention import triton_kernels
from inflight.engine.attention.plan import Card, common_tile, long_tile, plan, short_tile
from inflight.engine.attention.store import HeadNorms, Turn, rotate_and_store, store
from inflight.engine.cuda import elementwise, fp8
from inflight.engine.cuda.draw import draw
from inflight.engine.cuda.elementwise import Residual
from inflight.engine.cuda.experts import gated_product, mix, tile_of
from inflight.engine.cuda.experts import product as expert_product
from inflight.engine.cuda.routing import choose, deal
from inflight.engine.kvcache.memory_pool import StoredKv
from inflight.engine.models.config import ExpertsConfig
from inflight.engine.models.layers import Activation, RmsNorm

_SLOTS, _HEADS, _KV_HEADS = 64, 8, 2


class Absent:
    """In place of Triton's driver: says which GPU is to be compiled for."""

    def __init__(self, capability: int) -> None:
        self._capability, self._target = capability, GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # so that what was compiled for one is not taken for another

    def get_current_stream(self, device: int) -> int:
        return 0


def main(capability: int) -> None:
    driver.set_active(Absent(capability))
    told: list[str] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, **settings: Any) -> Any:
        made = launch(self, *args, **(settings | {"warmup": True}))
        print(self.__name__, *told, made.metadata.shared)
        return made

    JITFunction.run = compile_only
    caches = (None, torch.int8, torch.float8_e4m3fn) if capability >= 89 else (None, torch.int8)
    for dtype, cache in product((torch.float32, torch.bfloat16), caches):
        for dim in (128, 256) if cache is None else (128,):
            told[:] = [str(dtype), str(cache or dtype), str(dim)]
            _attention(Card(capability, 132), dtype, cache or dtype, dim)
    for dtype in (torch.float32, torch.bfloat16):
        told[:] = [str(dtype), "-", "-"]
        _between(dtype, capability >= 89)
        _experts(dtype)
    told[:] = ["torch.float64", "-", "-"]
    logits, number = torch.zeros(2, 4096), torch.ones(2, 1, dtype=torch.float64)
    draw(logits, number, 4096 * number, number, number, 0.5 * number)


def _attention(card: Card, dtype: torch.dtype, cache: torch.dtype, dim: int) -> None:
    keys = torch.zeros(_KV_HEADS, _SLOTS, dim, dtype=cache)
    scales = torch.ones(_KV_HEADS, _SLOTS, dtype=torch.bfloat16 if cache == torch.int8 else torch.float32)
    stored = StoredKv(keys, keys, scales, scales)
    key = torch.zeros(4, _KV_HEADS, dim, dtype=dtype)
    places = torch.zeros(4, dtype=torch.int32)
    store(key, key, places, stored)
    heads, table = torch.zeros(4, _HEADS + 2 * _KV_HEADS, dim, dtype=dtype), torch.zeros(9, dim, dtype=dtype)
    as_one = HeadNorms(heads[0].flatten(), heads[0].flatten(), 1e-6, form=2, as_one=True)
    scaled = Turn((table, places), interleaved=True, query_scale=torch.ones(4, 1, 1))
    of_heads = HeadNorms(key[0, 0], key[0, 0], 1e-6, form=1)
    for norms, turn in ((HeadNorms(), scaled), (of_heads, Turn((table, places))), (as_one, Turn())):
        rotate_and_store(heads, turn, places, stored, norms)
    query = torch.zeros(4, _HEADS, dim, dtype=dtype)
    ranges, members = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    group, window = _HEADS // _KV_HEADS, None
    for tile, longest, slots in (
        (short_tile(dtype, dim, group), 1, 9),
        (long_tile(card, dtype, dim, group), 100, 0),
        (common_tile(dtype, dim, group), 100, 9),
    ):
        dealt = plan(ranges, members, longest, tile, group, window, 30, slots)
        triton_kernels.attend(query, stored, query, ranges, dealt, 16, 1.0)
        if cache == dtype and dim == 128:
            triton_kernels.attend(query, stored, query, ranges, dealt, 16, 1.0, 30.0, query[0, :, 0])


def _between(dtype: torch.dtype, has_fp8: bool) -> None:
    x = torch.zeros(4, _HEADS, 128, dtype=dtype)
    rows, norm, scale = x.flatten(1), RmsNorm(1024, 1e-5).to(dtype), torch.ones(())
    for wanted in (None, scale) if has_fp8 else (None,):
        elementwise.gate(rows, True, wanted)
        for stream in (rows, Residual(rows, rows, None), Residual(rows, rows, norm.weight)):
            elementwise.FusedRmsNorm(norm, wanted)(stream)
            elementwise.FusedSum(norm, wanted)(stream)
    if has_fp8:
        fp8.quantize(x, scale)


def _experts(dtype: torch.dtype) -> None:
    hidden, inner, experts, each = 2048, 768, 128, 8
    x, inside = torch.zeros(9, hidden, dtype=dtype), torch.zeros(9 * each, inner, dtype=dtype)
    up, down = (torch.empty(experts, *size, dtype=dtype) for size in ((2 * inner, hidden), (hidden, inner)))
    tiles = {tile_of(dtype, pairs, experts) for pairs in (72, 8192, 65_536)}
    for routing, groups in (("softmax", 1), ("sigmoid", 8), ("chosen_softmax", 1), ("input_sigmoid", 1)):
        config = ExpertsConfig(experts, each, inner, routing, True, groups=groups, groups_per_token=groups // 2)  # type: ignore[arg-type]
        chosen, weights = choose(torch.zeros(9, experts, dtype=dtype), config, x[0, :experts] if groups > 1 else None)
    for count in (9, 1000):
        deal(torch.zeros(count, each, dtype=torch.int32), experts, 16)
    for tile in tiles:
        dealt = deal(chosen, experts, tile.rows)
        gated_product(x, up, None, dealt, tile, each, Activation(False))
        gated_product(x, up, up[:, :, 0], dealt, tile, each, Activation(False, 7.0), weights)
        expert_product(inside, down, None, dealt, tile, weights)
    for shared, gate in ((None, None), (x, None), (x, x[:, :1])):
        mix(torch.zeros(9, each, hidden, dtype=dtype), shared, gate)


if __name__ == "__main__":
    main(int(sys.argv[1]))
