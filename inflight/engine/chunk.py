"""Chunk: what a step computes of one sequence."""

from __future__ import annotations

from typing import NamedTuple

from inflight.engine.sequence import Sequence


class Chunk(NamedTuple):
    """A part of one sequence's tokens, computed in one step."""

    sequence: Sequence
    start: int
    size: int
    """Drafts included."""
    drafts: tuple[int, ...] = ()
    """Guesses of what follows the sequence's tokens, to be verified in this step."""
    parents: tuple[int, ...] = ()
    """Of each draft the one that it follows, see ``speculate.tree``."""
    awaits: bool = False
    """Whether it is one token that a step makes which is not read yet: the device has it, the sequence has not."""

    @property
    def samples(self) -> bool:
        """Whether the step ends with a new token of this sequence."""
        return self.awaits or self.start + self.size == len(self.sequence.tokens) + len(self.drafts)

    @property
    def tokens(self) -> list[int]:
        """What is computed; 0 in place of a token that it awaits."""
        return [0] if self.awaits else [*self.sequence.tokens[self.start : self.start + self.size], *self.drafts]

    @property
    def prefills(self) -> bool:
        """Whether it computes the prompt, or what a preemption has lost."""
        return self.start < max(len(self.sequence.request.prompt), self.sequence.computed_before)

    @property
    def recomputed(self) -> int:
        """How many of its tokens were computed before a preemption."""
        lost = self.sequence.computed_before - self.start
        return min(lost, self.size) if lost > 0 else 0
