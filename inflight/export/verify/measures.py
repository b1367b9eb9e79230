"""What a quantized checkpoint lost: perplexity, divergence, exact answers, recall; each beside the original's."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from inflight.export.data import Example
from inflight.export.progress import Progress, tracked


class Scores(Protocol):
    """A model that scores whole sequences."""

    def logits(self, tokens: list[int]) -> Tensor:
        """Return float32 ``[len(tokens), vocab]``: what follows each token."""


@dataclass
class Quality:
    """The measurements over one set of examples; the original's and the quantized checkpoint's."""

    perplexity: tuple[float, float]
    """Of the completions, given their prompts."""
    kl_divergence: float
    """Mean over the completions' positions, of the quantized distribution from the original's, in nats."""
    kl_of_examples: list[float] = field(default_factory=list)
    """The mean of each example."""
    exact: tuple[int, int] = (0, 0)
    """How many answers greedy decoding gives exactly."""
    asked: int = 0
    recalled: tuple[int, int] = (0, 0)
    """How many of the long prompts' answers it gives exactly."""
    recall_asked: int = 0

    @property
    def perplexity_increase(self) -> float:
        """As a fraction of the original's."""
        return self.perplexity[1] / self.perplexity[0] - 1

    @property
    def exact_match(self) -> float | None:
        """Exact answers, as a share of the original's number; None: it gives none."""
        return self.exact[1] / self.exact[0] if self.exact[0] else None

    @property
    def long_context_recall(self) -> float | None:
        """Recalled answers, as a share of the original's number; None: it recalls nothing."""
        return self.recalled[1] / self.recalled[0] if self.recalled[0] else None


def kl_divergence(original: Tensor, other: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each row of logits from the original's: ``[n]``, in nats."""
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measure(
    original: Scores,
    quantized: Scores,
    examples: Sequence[Example],
    recall: Sequence[Example],
    end_ids: Collection[int],
    progress: Progress,
) -> Quality:
    """Score both checkpoints on held-out examples, and on long prompts whose answer stands far back.

    Greedy decoding gives an answer exactly if, and only if, each of its tokens is the likeliest after the right ones
    before it: one pass over prompt and answer tells, and no text is generated.
    """
    losses, divergences, exact, positions = [0.0, 0.0], [], [0, 0], 0
    found = Quality((0.0, 0.0), 0.0, recall_asked=len(recall))
    for example in tracked(examples, "comparing with the original", progress):
        first = max(1, len(example.prompt))  # of a plain text, the first token is given
        both = [model.logits(example.tokens)[first - 1 :].cpu() for model in (original, quantized)]
        targets = torch.tensor(example.tokens[first:])
        for index, logits in enumerate(both):
            losses[index] += float(functional.cross_entropy(logits[:-1], targets, reduction="sum"))
            exact[index] += bool(example.prompt) and _is_exact(logits, example, end_ids)
        divergence = kl_divergence(both[0][:-1], both[1][:-1])
        divergences.append(float(divergence.sum()))
        found.kl_of_examples.append(float(f"{float(divergence.mean()):.3g}"))
        found.asked += bool(example.prompt)
        positions += len(targets)
    found.perplexity = (math.exp(losses[0] / positions), math.exp(losses[1] / positions))
    found.kl_divergence = sum(divergences) / positions
    found.exact = (exact[0], exact[1])
    found.recalled = _count_recalled(original, quantized, recall, end_ids, progress)
    return found


def _count_recalled(
    original: Scores, quantized: Scores, recall: Sequence[Example], end_ids: Collection[int], progress: Progress
) -> tuple[int, int]:
    counts = [0, 0]
    for example in tracked(recall, "recalling from long prompts", progress):
        for index, model in enumerate((original, quantized)):
            logits = model.logits(example.tokens)[len(example.prompt) - 1 :]
            counts[index] += _is_exact(logits, example, end_ids)
    return counts[0], counts[1]


def _is_exact(logits: Tensor, example: Example, end_ids: Collection[int]) -> bool:
    """Return whether greedy decoding gives the completion; in a chat, with its end.

    Args:
        logits: from the prompt's last token on, ``[len(completion) + 1, vocab]``.
        example: what should be decoded.
        end_ids: of the checkpoint.
    """
    *likeliest, last = logits.argmax(-1).tolist()
    return likeliest == list(example.completion) and (not example.chat or not end_ids or last in end_ids)
