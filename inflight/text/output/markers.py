"""Tokens to text and markers: special tokens have no text, but a chat format needs to see some of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.text.detokenizer import UNREADABLE, IncrementalDetokenizer, run_text
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marker:
    """A special token in the output, at its place in the text."""

    token: int
    text: str
    """How the vocabulary names it, such as ``<|python_tag|>``; no client ever sees it."""


Piece = str | Marker


class MarkedDetokenizer:
    """The text of one stream with its markers. Without these it is exactly what ``IncrementalDetokenizer`` gives."""

    def __init__(self, tokenizer: Tokenizer, markers: frozenset[int]) -> None:
        """``markers`` are special tokens; all other special tokens are left out."""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._pieces = tokenizer.token_bytes
        self._markers = {token: Marker(token, tokenizer.token_text(token)) for token in markers}
        self._waiting: list[tuple[int, Marker]] = []
        """Markers behind bytes that are not settled, and how many bytes those are."""
        self._held: list[Piece] = []
        """What has come but may not be shown yet."""
        self._shown = 0

    def push(self, tokens: Iterable[int], text_limit: int | None = None) -> list[Piece]:
        """Take the next tokens; return what is settled and may be shown, without empty texts.

        Of the whole stream, ``text_limit`` characters may be shown so far, as the engine says because of stop strings;
        None: all. A marker is shown when all text before it is.
        """
        for token in tokens:
            if (marker := self._markers.get(token)) is not None:
                self._mark(marker)
                continue
            if self._waiting and isinstance(self._pieces[token], str):
                self._settle()
            self._hold(self._detokenizer.push((token,)))
        return self._show(text_limit)

    def finish(self, text_limit: int | None = None) -> list[Piece]:
        """Return what was still held back; what lies beyond the limit is dropped. Nothing comes after it."""
        if self._waiting:
            self._settle(final=True)
        self._hold(self._detokenizer.finish())
        return self._show(text_limit)

    @property
    def hidden(self) -> str:
        """The text beyond the limit; after the end of a stream it begins with the stop string that has ended it."""
        return "".join(piece for piece in self._held if isinstance(piece, str))

    def _mark(self, marker: Marker) -> None:
        """Place a marker: behind the bytes of the run at hand, where there is one."""
        if held := self._detokenizer.held_bytes:
            self._waiting.append((len(held), marker))
        else:
            self._held.append(marker)

    def _settle(self, final: bool = False) -> None:
        """End the run of bytes, as text or the end of the stream does, and place the markers that came inside it."""
        run = self._detokenizer.held_bytes
        whole = run_text(run, final)
        replaced = whole == UNREADABLE * len(run)  # each byte by a character
        places = [size if replaced else len(run[:size].decode("utf-8", "ignore")) for size, _ in self._waiting]
        text = self._detokenizer.end_run(final)
        lost, start = len(whole) - len(text), 0
        for place, (_, marker) in zip(places, self._waiting, strict=True):
            end = max(start, place - lost)
            self._hold(text[start:end])
            self._held.append(marker)
            start = end
        self._hold(text[start:])
        self._waiting.clear()

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)

    def _show(self, text_limit: int | None) -> list[Piece]:
        """Return what may be shown of what is held, with neighbouring texts joined."""
        shown: list[Piece] = []
        texts: list[str] = []
        for index, piece in enumerate(self._held):
            if isinstance(piece, Marker):
                if texts:
                    shown.append("".join(texts))
                    texts.clear()
                shown.append(piece)
                continue
            room = len(piece) if text_limit is None else max(0, text_limit - self._shown)
            self._shown += min(room, len(piece))
            if piece[:room]:
                texts.append(piece[:room])
            if room < len(piece):
                self._held = [piece[room:], *self._held[index + 1 :]]
                break
        else:
            self._held = []
        return [*shown, "".join(texts)] if texts else shown
