"""How large the tiles are that attention works on.

Keys come in the same tiles wherever they are read: what a token sees is added up tile by tile, so their size is part of
the result. Rows come in two sizes, since a tile of few rows reads keys as fast as memory gives them, and a tile of many
multiplies as fast as tensor cores do. The sizes are the largest at which the compiler keeps all in registers (a test
compiles them), in blocks of less than 99 KiB of shared memory, which the smallest GPUs with FP8 have.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

LONGEST_SHORT = 32
"""Spans of no more tokens take the tile of rows of a token alone: what checks drafts, and the end of a prompt."""
_PROGRAMS_PER_PROCESSOR = 4
"""That run at once, where tiles have few rows."""


@dataclass(frozen=True)
class Card:
    """What the choice depends on."""

    capability: int
    """Compute capability, such as 90."""
    processors: int
    """Streaming multiprocessors."""


@dataclass(frozen=True)
class Tile:
    """The sizes of an attention kernel."""

    rows: int
    keys: int
    warps: int
    stages: int
    """Of the pipeline that loads keys and values."""


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return what ``device`` is; a small card where there is none, for the interpreter."""
    if device.type != "cuda":
        return Card(80, 4)
    properties = torch.cuda.get_device_properties(device)
    return Card(10 * properties.major + properties.minor, properties.multi_processor_count)


def shares(card: Card, kv_heads: int) -> int:
    """Return among how many programs of each head of keys the work is dealt out, to fill the card once."""
    return max(1, triton.cdiv(card.processors * _PROGRAMS_PER_PROCESSOR, kv_heads))


def short_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for spans of one token and other short ones; ``group``: heads that share keys."""
    return Tile(_least(group), _keys(dtype, head_dim), 8 if dtype == torch.float32 else 4, 2)


def long_tile(card: Card, dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for the chunks of prompts."""
    if 90 <= card.capability < 120 and dtype != torch.float32 and head_dim <= 128:
        return Tile(128, _keys(dtype, head_dim), 8, 2)  # what is multiplied comes from shared memory there
    return common_tile(dtype, head_dim, group)


def common_tile(dtype: torch.dtype, head_dim: int, group: int) -> Tile:
    """Return the tile for all spans where a token's bits must not depend on which tile it is in.

    In 16 bits it is slower than the others: too many rows for one token, and on some cards too few for a long prompt.
    """
    return Tile(max(_least(group), 16 if dtype == torch.float32 else 64), _keys(dtype, head_dim), 8, 2)


def _least(group: int) -> int:
    """Return the rows of the smallest tile that can be multiplied and has all heads of a token."""
    return max(16, triton.next_power_of_2(group))


def _keys(dtype: torch.dtype, head_dim: int) -> int:
    return 32 if dtype == torch.float32 or head_dim > 128 else 64
