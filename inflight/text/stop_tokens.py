"""Token sequences that certainly bring a stop string into the text: they save steps of an engine that knows tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from inflight.text.pieces import Family
from inflight.text.tokenizer import Tokenizer

_SEPARATOR = b"\xff"
"""In no UTF-8 text, so that no string is found across two pieces."""
MOST = 512
"""Sequences for one request: an engine compares with each of them at each step, and a newline is in hundreds."""


class StopTokens:
    """The pieces of a vocabulary, to be searched."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer.pieces.family is Family.BYTE_LEVEL
        pieces = [self._piece(token) for token in range(tokenizer.config.vocab_size)]
        self._starts, place = [], 0
        for piece in pieces:
            self._starts.append(place)
            place += len(piece) + 1
        self._joined = _SEPARATOR.join(pieces)

    def sequences(self, word: str, most: int = MOST) -> list[list[int]]:
        """Return spellings of ``word``, and then single tokens that have it in them; ``most`` of them.

        A text in which one of them has come has the string, at the latest then, whatever stands before.
        """
        spellings = map(self._tokenizer.spelling, (word, f" {word}"))
        certain = [tuple(tokens) for tokens in spellings if tokens and self._certain(word.encode(), tokens)]
        found = dict.fromkeys([*certain, *((token,) for token in self._tokens(word.encode(), most))])
        return [list(one) for one in found][:most]

    def special(self, word: str) -> int | None:
        """Return the special token of this name, which has no text; None: there is none."""
        tokens = self._tokenizer.spelling(word)
        return tokens[0] if len(tokens) == 1 and self._tokenizer.pieces[tokens[0]] is None else None

    def _tokens(self, word: bytes, most: int) -> list[int]:
        found: list[int] = []
        place = self._joined.find(word)
        while place >= 0 and len(found) < most:
            token = bisect_right(self._starts, place) - 1
            found.append(token)
            place = self._joined.find(word, self._starts[token] + len(self._piece(token)))
        return found

    def _certain(self, word: bytes, tokens: Sequence[int]) -> bool:
        text = b"".join(map(self._piece, tokens)) if self._byte_level else self._text(tokens).lstrip(" ").encode()
        return word in text

    def _text(self, tokens: Sequence[int]) -> str:
        # A byte that stands for itself is text together with its neighbours only.
        pieces = (self._tokenizer.pieces[token] for token in tokens)
        return "".join(piece if isinstance(piece, str) else "\0" for piece in pieces)

    def _piece(self, token: int) -> bytes:
        """Return what a token adds to any text; spaces that a text may lose at its start are no part of it."""
        piece = self._tokenizer.pieces[token]
        if self._byte_level:
            return piece if isinstance(piece, bytes) else b""
        return piece.lstrip(" ").encode() if isinstance(piece, str) else b""
