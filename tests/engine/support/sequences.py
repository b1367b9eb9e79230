"""Logits, a sequence that a token of them is sampled for, and the sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inflight.engine.request import Request
from inflight.engine.sampler import sample_async
from inflight.engine.sequence import Sampled, Sequence
from inflight.sampling import SamplingParams

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -6.0])


def make_sequence(
    seed: int = 0, prompt: tuple[int, ...] = (0,), generated: tuple[int, ...] = (), **more: Any
) -> Sequence:
    """Return a sequence that is at its next token; ``more``: of its sampling."""
    request = Request(list(prompt), SamplingParams(max_tokens=10, **more))
    sequence = Sequence(request, 0, seed, 100, None)
    sequence.tokens += generated
    return sequence


def sample(logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Sample one token per row ``[n, vocab]``, and wait for it."""
    return sample_async(logits, sequences).wait()
