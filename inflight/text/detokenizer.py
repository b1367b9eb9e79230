"""Incremental detokenization: a stream's tokens to text, as they come; joined, exactly the whole decoding.

Text is held back only while a later token could still change it: an unfinished character, and in byte-fallback
vocabularies a run of byte tokens (one wrong byte turns the whole run into replacement characters, so none of it is
settled before the run ends).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from inflight.text.pieces import Family
from inflight.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    """The text state of one stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._first = True
        self._spaces_to_drop = self._pieces.leading_spaces
        self._byte_level = self._pieces.family is Family.BYTE_LEVEL

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens; return the text that is settled by them."""
        if self._byte_level:
            pieces = map(self._pieces.__getitem__, tokens)
            return self._utf8.decode(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
        return self._without_leading_spaces("".join([self._next(token) for token in tokens]))

    def finish(self) -> str:
        """Return the text that was still held back; nothing comes after it."""
        if self._byte_level:
            return self._utf8.decode(b"", final=True)
        return self._without_leading_spaces(self._end_run())

    def _next(self, token: int) -> str:
        piece = self._pieces.first(token) if self._first else self._pieces[token]
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._end_run() + piece if self._run else piece

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_leading_spaces(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text
