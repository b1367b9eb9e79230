"""The text of one stream: what has been shown, and what may be shown next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer


class TextChunk(NamedTuple):
    """A part of a stream's text, and where it lies in it: ``[start, end)`` in code points."""

    text: str
    start: int
    end: int
    tokens: int
    """Of the stream so far."""


class StreamText:
    """Turns a stream's tokens into chunks of text, cut at the limit that the engine's stop strings set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._held = ""
        self._shown = 0
        self._tokens = 0

    def push(self, tokens: Sequence[int], text_limit: int | None, final: bool) -> TextChunk:
        """Take the next tokens; return the text to show now.

        Args:
            tokens: the new token ids.
            text_limit: how many characters of the whole stream may be shown so far; None: all.
            final: no token comes after these.
        """
        self._tokens += len(tokens)
        text = self._held + self._detokenizer.push(tokens)
        if final:
            text += self._detokenizer.finish()
        room = len(text) if text_limit is None else max(0, text_limit - self._shown)
        chunk, self._held = text[:room], text[room:]
        start, self._shown = self._shown, self._shown + len(chunk)
        return TextChunk(chunk, start, self._shown, self._tokens)
