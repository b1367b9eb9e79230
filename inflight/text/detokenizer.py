"""Incremental detokenization: turns a stream's tokens into text as they come. The parts joined are the whole decoding.

There is one difference: where an answer is cut inside a character, a whole decoding ends with a replacement character,
and the stream drops the bytes of the unfinished one. Bytes that no later token could mend are replaced, as there.

Text is held back in two places. ``IncrementalDetokenizer`` holds back what a later token could still change: an
unfinished character and, in byte-fallback vocabularies, a run of byte tokens, since one wrong byte turns all of them
into replacement characters. ``StreamText``, in the detokenizer stage, holds back what may belong to a stop string. The
engine searches for these (``stops.StopTextLimit``) and says in each response how many characters may be shown.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from inflight.text.tokenizer import DecoderKind, Tokenizer

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""In place of bytes that are no UTF-8."""


class IncrementalDetokenizer:
    """The text state of one stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()
        self._first = True
        self._spaces_to_drop = self._token_bytes.leading_spaces
        self._byte_level = self._token_bytes.decoder is DecoderKind.BYTE_LEVEL

    def push(self, tokens: Iterable[int]) -> str:
        """Take the next tokens; return the text that is settled by them."""
        if self._byte_level:
            pieces = map(self._token_bytes.__getitem__, tokens)
            return self._utf8.decode(b"".join(piece for piece in pieces if isinstance(piece, bytes)))
        return self._without_leading_spaces("".join([self._next(token) for token in tokens]))

    def finish(self) -> str:
        """Return the text that was still held back, without an unfinished character; nothing comes after it."""
        if self._byte_level:
            self._utf8.reset()
            return ""
        return self.end_run(final=True)

    @property
    def settled(self) -> bool:
        """Whether all tokens so far have become text: no byte is held back."""
        return not self._run and not self._utf8.getstate()[0]

    @property
    def held_bytes(self) -> bytes:
        """The run of byte tokens that is not settled yet; always empty in byte-level vocabularies."""
        return bytes(self._run)

    def end_run(self, final: bool = False) -> str:
        """Settle the run of byte tokens, as a token of text would or, with ``final``, the end; return its text."""
        return self._without_leading_spaces(self._end_run(final))

    def _next(self, token: int) -> str:
        piece = self._token_bytes.first(token) if self._first else self._token_bytes[token]
        if piece is None:
            return ""
        self._first = False
        if isinstance(piece, bytes):
            self._run += piece
            return ""
        return self._end_run() + piece if self._run else piece

    def _end_run(self, final: bool = False) -> str:
        run, self._run = bytes(self._run), bytearray()
        return run_text(run, final)

    def _without_leading_spaces(self, text: str) -> str:
        if not self._spaces_to_drop:
            return text
        spaces = min(self._spaces_to_drop, len(text) - len(text.lstrip(" ")))
        self._spaces_to_drop = 0 if spaces < len(text) else self._spaces_to_drop - spaces
        return text[spaces:]


def run_text(run: bytes, final: bool) -> str:
    """Return the text of a run of byte tokens: one wrong byte turns all of them into replacement characters.

    With ``final`` nothing follows, and an unfinished character at its end is dropped.
    """
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(run, final=not final)
    except UnicodeDecodeError:
        return UNREADABLE * len(run)


def whole_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Return the text that a stream of these tokens shows in the end."""
    stream = IncrementalDetokenizer(tokenizer)
    return stream.push(tokens) + stream.finish()


class TextDelta(NamedTuple):
    """A part of a stream's text, and where it lies in it: ``[start, end)`` in code points."""

    text: str
    start: int
    end: int


class StreamText:
    """The detokenizer stage's text of one stream: it shows no more characters than the engine allows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._held = ""  # the text beyond the limit
        self._shown = 0  # the number of characters before it

    def push(self, tokens: Sequence[int], text_limit: int | None, final: bool) -> TextDelta:
        """Take the next tokens, the last ones with ``final``; return the text to show now.

        Of the whole stream, ``text_limit`` characters may be shown so far; None: all.
        """
        text = self._held + self._detokenizer.push(tokens)
        if final:
            text += self._detokenizer.finish()
        room = len(text) if text_limit is None else max(0, text_limit - self._shown)
        shown, self._held = text[:room], text[room:]
        start, self._shown = self._shown, self._shown + len(shown)
        return TextDelta(shown, start, self._shown)
