"""Logits to draw tokens from: ties, masks, infinities; and what to draw them by, with all cuts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


def plain(x: Tensor, _: torch.Generator) -> Tensor:
    return x


def ties(x: Tensor, _: torch.Generator) -> Tensor:
    return (x * 2).round() / 2


def bfloat16(x: Tensor, _: torch.Generator) -> Tensor:
    return x.bfloat16().float()


def masked(x: Tensor, generator: torch.Generator) -> Tensor:
    x = x.masked_fill(torch.rand(x.shape, generator=generator) < 0.6, -torch.inf)
    x[:, 0] = 0.0
    return x


def guided(x: Tensor, generator: torch.Generator) -> Tensor:
    """Allow few tokens of each row: one, or about a fiftieth of them."""
    few = torch.rand(x.shape, generator=generator) < torch.randint(2, (len(x), 1), generator=generator) / 50
    few.scatter_(1, torch.randint(x.shape[1], (len(x), 1), generator=generator), True)
    return x.masked_fill(~few, -torch.inf)


def zeros(x: Tensor, generator: torch.Generator) -> Tensor:
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, 0.0, x)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.5, x, -x)


def infinite(x: Tensor, _: torch.Generator) -> Tensor:
    x[:, 5], x[:, 3], x[:, 9] = torch.inf, LARGEST, torch.inf
    return x


KINDS = [plain, ties, bfloat16, masked, guided, zeros, infinite]


def make_case(
    rows: int, size: int, kind: Callable[[Tensor, torch.Generator], Tensor], generator: torch.Generator
) -> list[Tensor]:
    """Return arguments of ``draw``: random logits, and for each row a random choice of what it is drawn by."""

    def pick(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (rows, 1), generator=generator)]

    logits = kind(3 * torch.randn(rows, size, generator=generator), generator)
    temperature = pick(0.1, 0.5, 0.8, 1.0, 1.3, 2.0, 5.0)
    top_k = pick(1, 2, 7, 8, 9, 20, size - 1, size, size, size)
    top_p, min_p = pick(1.0, 1.0, 0.5, 0.9, 0.95, 0.99, 1e-3), pick(0.0, 0.0, 0.0, 0.05, 0.3, 1.0)
    number = torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    return [logits, temperature, top_k, top_p, min_p, number]
