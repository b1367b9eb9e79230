"""Chunk: the part of one sequence that a step computes."""

from __future__ import annotations

from typing import NamedTuple

from inflight.engine.sequence import Sequence
from inflight.engine.stats import StepCounts


class Chunk(NamedTuple):
    """A part of one sequence's tokens, computed in one step."""

    sequence: Sequence
    start: int
    size: int
    """The number of tokens, drafts included."""
    drafts: tuple[int, ...] = ()
    """Guesses of what follows the sequence's tokens, to be verified in this step."""
    parents: tuple[int, ...] = ()
    """For each draft the index of the draft that it follows, see ``speculate.verification``."""
    awaits: bool = False
    """Whether it is one token that a launched step samples: the device has it, and the host has not read it."""

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new token of this sequence."""
        whole = self.awaits or self.start + self.size == len(self.sequence.tokens) + len(self.drafts)
        return whole and self.sequence.request.sampling.pooling is None

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed; 0 in place of a token that it awaits."""
        return [0] if self.awaits else [*self.sequence.tokens[self.start : self.start + self.size], *self.drafts]

    @property
    def prefills(self) -> bool:
        """Whether it computes the prompt, what an earlier run has generated, or what a preemption has lost."""
        request = self.sequence.request
        return self.start < max(len(request.prompt) + len(request.resumed_ids), self.sequence.computed_before)

    @property
    def recomputed(self) -> int:
        """How many of its tokens were computed before a preemption."""
        lost = self.sequence.computed_before - self.start
        return min(lost, self.size) if lost > 0 else 0


def count_chunks(chunks: list[Chunk]) -> StepCounts:
    """Return what a step of these chunks computes."""
    prefills = [chunk for chunk in chunks if chunk.prefills]
    tokens, prefill_tokens = (sum(chunk.size for chunk in some) for some in (chunks, prefills))
    recomputed, drafted = sum(chunk.recomputed for chunk in prefills), sum(bool(chunk.drafts) for chunk in chunks)
    decodes, decode_tokens = len(chunks) - len(prefills), tokens - prefill_tokens
    return StepCounts(len(chunks), len(prefills), decodes, prefill_tokens, decode_tokens, recomputed, drafted)
