"""One attention step over a cache full of traps, by the kernels and by plain PyTorch."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from inflight.engine.attention.torch_backend import QueryRange, TorchAttention
from inflight.engine.attention.triton_backend import BlockTables, StepLayout, TritonAttention
from inflight.engine.kvcache.memory_pool import Fp8KvPool, Int8KvPool, KvPool, KvScales
from inflight.engine.models.config import ModelConfig
from inflight.engine.models.layers import AttentionOptions
from inflight.engine.models.reading import read_model_config
from inflight.engine.transfer import TokenIds

BLOCKS, LAYERS = 40, 2
SCALES = (2.0**-6, 2.0**-5)
"""Of the keys, and of the values, of the layer that is looked at."""
CPU = torch.device("cpu")
MIXED = [(0, 1), (300, 1), (17, 9), (0, 40), (77, 1), (31, 2)]
"""(start, count) of chunks: single tokens and prefills, with and without context, across borders of tiles."""


def shape(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """Return a model of two layers with such heads."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    sizes = dict.fromkeys(names, 64) | {"num_hidden_layers": LAYERS, "num_attention_heads": heads}
    return read_model_config(
        sizes | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": kv_heads, "head_dim": head_dim}
    )


def ranges_of(lengths: list[tuple[int, int]], block_size: int) -> list[QueryRange]:
    """Return query ranges of ``(start, count)``, with blocks dealt out at random, none to two of them."""
    free = random.Random(len(lengths)).sample(range(BLOCKS), BLOCKS)
    ranges, first = [], 0
    for start, count in lengths:
        ranges.append(QueryRange(first, start, count, [free.pop() for _ in range(-(-(start + count) // block_size))]))
        first += count
    return ranges


def filled(
    config: ModelConfig, ranges: list[QueryRange], block_size: int, dtype: torch.dtype, kind: str, device: torch.device
) -> KvPool:
    """Return a cache with the query ranges' context, always the same; what nobody may look at is no number."""
    tensors: KvPool
    if kind == "int8":
        tensors = Int8KvPool(config, BLOCKS, block_size, dtype, device)
    elif kind == "fp8":
        scales = KvScales(*(torch.tensor([8 * scale, scale], device=device) for scale in SCALES))
        tensors = Fp8KvPool(config, BLOCKS, block_size, dtype, device, scales)
    else:
        tensors = KvPool(config, BLOCKS, block_size, dtype, device)
    generator = torch.Generator().manual_seed(len(ranges))
    size = tensors.slots
    everything = torch.full((size, config.num_kv_heads, config.head_dim), torch.nan, dtype=dtype, device=device)
    for layer in range(LAYERS):
        tensors.write(layer, torch.arange(size, device=device), everything, everything)
        for query_range in ranges:
            slots = [block * block_size + place for block in query_range.blocks for place in range(block_size)][
                : query_range.start
            ]
            key, value = torch.randn(2, len(slots), *everything.shape[1:], generator=generator).to(dtype).to(device)
            tensors.write(layer, torch.tensor(slots, dtype=torch.long, device=device), key, value)
    return tensors


def both(
    config: ModelConfig,
    lengths: list[tuple[int, int]],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kind: str = "",
    window: int | None = None,
    device: torch.device = CPU,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return what the kernels see, and what the reference sees, after both have stored the same."""
    given = torch.linspace(-2, 3, config.num_heads, device=device).to(dtype) if sinks else None
    options = AttentionOptions(config.attention_scale, window, softcap=softcap, sinks=given)
    ranges = ranges_of(lengths, block_size)
    ours, theirs = (filled(config, ranges, block_size, dtype, kind, device) for _ in range(2))
    step = (1, *activations(config, ranges, dtype, device, kind), options)
    expected = TorchAttention(theirs, ranges, block_size)(*step)
    seen = kernels_see(ours, ranges, block_size, *step)
    for mine, its in zip(ours.parts, theirs.parts, strict=True):
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8)), "what is stored differs"
    return seen, expected


def kernels_see(
    tensors: KvPool, ranges: list[QueryRange], block_size: int, *step: object, one_tile: bool = False
) -> Tensor:
    """Return what a step's attention by the kernels is; ``step``: what the model calls it with."""
    tokens = ranges[-1].first + ranges[-1].count
    tables = BlockTables(len(ranges), BLOCKS, block_size, tensors.device)
    _, layout = StepLayout.of(TokenIds([0] * tokens), ranges, tables)
    return TritonAttention(tensors.layers, layout, block_size, one_tile)(*step)


def activations(
    config: ModelConfig, ranges: list[QueryRange], dtype: torch.dtype, device: torch.device, kind: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of the query ranges' tokens, each the same whatever ranges come after it."""
    generator = torch.Generator().manual_seed(1)
    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    tokens = ranges[-1].first + ranges[-1].count
    query, *stored = torch.randn(tokens, sum(heads), config.head_dim, generator=generator).split(heads, 1)
    if device.type == "cpu":
        stored = [_unrounded(part, kind, scale) for part, scale in zip(stored, SCALES, strict=True)]
    return query.to(device, dtype), stored[0].to(device, dtype), stored[1].to(device, dtype)


def _unrounded(x: Tensor, kind: str, scale: float) -> Tensor:
    """Return ``x`` such that FP8, or INT8's scales, hold it as it is: what hardware rounds, the interpreter cuts."""
    if kind == "fp8":
        return (x / scale).to(torch.float8_e4m3fn).float() * scale
    if kind == "int8":
        largest = torch.full_like(x[..., :1], 127 * scale)
        return torch.cat((largest, x[..., 1:].clamp(-127 * scale, 127 * scale)), -1)
    return x


def halfway() -> Tensor:
    """Return float32 ``[128, 256]`` whose quotients by each row's INT8 scale lie halfway between two integers.

    Scales have every mantissa of bfloat16. A quotient that is off by one last bit goes to the wrong integer.
    """
    scales = 1 + torch.arange(128.0) / 128
    return scales[:, None] * torch.cat((torch.tensor([127.0, -127.0]), torch.arange(-126.5, 127)))
