"""Prompt lookup: if a sequence's last tokens occur earlier in it, the draft is the tokens that followed them there.

As in https://github.com/apoorvumang/prompt-lookup-decoding, the drafter looks for the longest n-gram at the end of the
sequence that occurs earlier in it, and guesses the tokens behind its last occurrence. That costs next to nothing, and
it pays where answers repeat their prompts: summaries, edits, code, retrieval.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from itertools import islice

from inflight.engine.sequence import Sequence

_TOKEN = "i"  # as array calls a C int
_WIDTH = array(_TOKEN).itemsize
_MATCHES = 4
"""Occurrences that are looked at for each guess."""


class NgramDrafter:
    """Drafts tokens that the sequence itself has had before."""

    def __init__(self, max_ngram_size: int, candidates: int = 1) -> None:
        """N-grams of ``max_ngram_size`` tokens are looked for, then shorter ones; ``candidates``: guesses, at most."""
        self._max_size, self._candidates = max_ngram_size, candidates
        self._texts: dict[Sequence, bytearray] = {}
        """Each sequence's tokens as bytes, four for each: `rfind` on bytes is the fastest search."""

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """Append the sequences' new tokens."""
        for sequence in wanted:
            text = self._texts.setdefault(sequence, bytearray())
            text += array(_TOKEN, sequence.tokens[len(text) // _WIDTH :]).tobytes()

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Return the tokens that followed before, as guesses that differ in their first token."""
        return {sequence: list(self._continuations(sequence, count)) for sequence, count in wanted.items()}

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's tokens."""
        self._texts.pop(sequence, None)

    def reset(self) -> None:
        """Drop the tokens of all."""
        self._texts.clear()

    def check_idle(self) -> None:
        """Check that no sequence's tokens are kept."""
        assert not self._texts, f"the tokens of {len(self._texts)} ended sequences are kept"

    def _continuations(self, sequence: Sequence, count: int) -> Iterator[list[int]]:
        tokens, firsts = sequence.tokens, set[int]()
        for behind in islice(self._matches(sequence), _MATCHES * self._candidates):
            if tokens[behind] not in firsts:
                firsts.add(tokens[behind])
                # Where the match reaches the end itself, the text repeats with this period, and may go on to.
                period = len(tokens) - behind
                yield [tokens[behind + place % period] for place in range(count)]
            if len(firsts) == self._candidates:
                return

    def _matches(self, sequence: Sequence) -> Iterator[int]:
        """Yield the places behind earlier occurrences of the last n-gram, of the longest first, the latest first."""
        text = self._texts[sequence]
        for size in range(min(self._max_size, len(sequence.tokens) - 1), 0, -1):
            ending, end = text[-size * _WIDTH :], len(text) - _WIDTH
            while (found := text.rfind(ending, 0, end)) >= 0:
                if found % _WIDTH == 0:  # otherwise the found bytes begin within a token
                    yield found // _WIDTH + size
                end = found + len(ending) - 1  # the next occurrence may overlap this one
