"""Verification: which drafts of a step are what the sequence would have got without them.

A drafted position is sampled as every other is: from the target's own distribution, with all that the request asks for,
at the one number that seed and position give. A draft is accepted while it equals that token. So the tokens are those
of a run without speculation, greedy or sampled, whatever the drafts are, and so is their distribution.

Rejection sampling (arXiv:2211.17192, arXiv:2302.01318) accepts a draft more often, up to one minus the total variation
of both distributions, but then tokens depend on the drafts: on the draft model, on its rounding, on the batch. What is
lost is won back in part by drafting with the same number: two distributions that are alike, each drawn by inverse
transform at one number, mostly give the same token (coupling by common random numbers, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from inflight.engine.request import Request
from inflight.engine.sampler import SamplingRow
from inflight.engine.sequence import Chunk, Sampled, Sequence
from inflight.engine.speculate.tree import ROOT, ancestry, child


@dataclass(frozen=True)
class Continuation:
    """A sequence as it would be with some drafts accepted: what a drafted position is sampled for."""

    sequence: Sequence
    drafts: tuple[int, ...]

    @property
    def request(self) -> Request:
        """The sequence's request."""
        return self.sequence.request

    @property
    def seed(self) -> int:
        """The sequence's seed."""
        return self.sequence.seed

    @property
    def generated(self) -> int:
        """Tokens generated before this position."""
        return self.sequence.generated + len(self.drafts)

    @cached_property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens before this position."""
        return [*self.sequence.tokens, *self.drafts]


def verify_positions(chunks: Iterable[Chunk]) -> list[SamplingRow]:
    """Return what each row of a step's logits is sampled for."""
    return [row for chunk in chunks if chunk.samples for row in _rows_of(chunk)]


def accepted_tokens(chunks: Iterable[Chunk], sampled: list[Sampled]) -> list[list[Sampled]]:
    """Return, for each chunk, the tokens that it has made: one more than the drafts accepted; none if it samples none.

    Args:
        chunks: the step's.
        sampled: one for each of ``verify_positions(chunks)``.
    """
    made, first = [], 0
    for chunk in chunks:
        count = len(chunk.drafts) + 1 if chunk.samples else 0
        made.append(_follow(chunk, sampled[first : first + count]) if count else [])
        first += count
    return made


def _follow(chunk: Chunk, sampled: list[Sampled]) -> list[Sampled]:
    """Return the tokens on the path through a chunk's drafts that its own samples take."""
    made, node = [sampled[0]], child(chunk.drafts, chunk.parents, ROOT, sampled[0].token)
    while node is not None:
        made.append(sampled[node + 1])
        node = child(chunk.drafts, chunk.parents, node, made[-1].token)
    return made


def _rows_of(chunk: Chunk) -> Iterator[SamplingRow]:
    yield chunk.sequence
    for node in range(len(chunk.drafts)):
        path = ancestry(chunk.parents, node)
        yield Continuation(chunk.sequence, tuple(chunk.drafts[place] for place in path))
