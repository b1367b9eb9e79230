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
    """How many answers greedy decoding gives exactly; of the quantized, those that the original gives too."""
    asked: int = 0
    recalled: tuple[int, int] = (0, 0)
    """Of the long prompts; likewise."""
    recall_asked: int = 0

    @property
    def perplexity_increase(self) -> float:
        """As a fraction of the original's."""
        return self.perplexity[1] / self.perplexity[0] - 1

    @property
    def exact_match(self) -> float | None:
        """Share of the original's exact answers that stay exact; None: it gives none."""
        return self.exact[1] / self.exact[0] if self.exact[0] else None

    @property
    def long_context_recall(self) -> float | None:
        """Share of what the original recalls that stays recalled; None: it recalls nothing."""
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
    losses, divergences, positions, found = [0.0, 0.0], [], 0, Quality((0.0, 0.0), 0.0)
    for example in tracked(examples, "comparing with the original", progress):
        before, after = (_of_completion(model, example) for model in (original, quantized))
        targets = torch.tensor(example.completion[-len(before) :], device=before.device)
        for index, logits in enumerate((before, after)):
            losses[index] += float(functional.cross_entropy(logits, targets.to(logits.device), reduction="sum"))
        divergence = kl_divergence(before, after.to(before.device))
        divergences.append(float(divergence.sum()))
        found.kl_of_examples.append(float(divergence.mean()))
        positions += len(targets)
    perplexity = (math.exp(losses[0] / positions), math.exp(losses[1] / positions))
    found.perplexity, found.kl_divergence = perplexity, sum(divergences) / positions
    answers = [one for one in examples if one.prompt]
    found.asked, found.recall_asked = len(answers), len(recall)
    found.exact = _count_exact(original, quantized, answers, end_ids, "asking questions", progress)
    found.recalled = _count_exact(original, quantized, recall, end_ids, "recalling from long prompts", progress)
    return found


def _of_completion(model: Scores, example: Example) -> Tensor:
    """Return the logits that predict the completion; of a plain text, its first token is given."""
    first = max(1, len(example.prompt))
    return model.logits(example.tokens)[first - 1 : -1]


def _count_exact(
    original: Scores,
    quantized: Scores,
    examples: Sequence[Example],
    end_ids: Collection[int],
    what: str,
    progress: Progress,
) -> tuple[int, int]:
    right = [one for one in tracked(examples, what, progress) if answers_exactly(original, one, end_ids)]
    return len(right), sum(answers_exactly(quantized, one, end_ids) for one in tracked(right, what, progress))


def answers_exactly(model: Scores, example: Example, end_ids: Collection[int]) -> bool:
    """Return whether greedy decoding from the prompt gives the completion; in a chat, with its end."""
    likeliest = model.logits(example.tokens).argmax(-1).tolist()[len(example.prompt) - 1 :]
    ends = not example.chat or not end_ids or likeliest[-1] in end_ids
    return likeliest[:-1] == list(example.completion) and ends
