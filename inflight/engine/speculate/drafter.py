"""Drafter: what guesses the next tokens of sequences. A wrong guess costs time; none ever changes a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from inflight.engine.sequence import Sequence


class Drafter(Protocol):
    """Guesses; it keeps what it must know of each sequence until that is forgotten."""

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """Learn what is new in the sequences: the part of the work that does not grow with what is drafted."""

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Return guesses for the sequences that were prepared.

        Args:
            wanted: how many tokens for whom, at most and at least 1 each.

        Returns:
            Guesses of what comes next, the likeliest first; none for a sequence that nothing is known for.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence, if anything is."""

    def reset(self) -> None:
        """Drop what is kept of all sequences, in whatever state it is."""

    def check_idle(self) -> None:
        """Check that nothing is kept where no sequence is left.

        Raises:
            AssertionError: something is.
        """
