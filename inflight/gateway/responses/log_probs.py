"""Which log-probs belong to the text of a response: those of reasoning and of calls do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inflight.gateway.log_probs import TokenLogProb


class TextLogProbs:
    """Hands out the log-probs of the text, in step with it.

    The output comes token by token, so what it hands out, joined, does not depend on how the engine cut the output.
    Text comes as soon as it cannot be anything else. So the first text behind reasoning or a call is the last text of
    the output so far, and the text that follows it is what comes next.
    """

    def __init__(self) -> None:
        self._waiting: list[TokenLogProb] = []
        """Log-probs of tokens that belong to no text yet."""
        self._owed = 0
        """Bytes of the text whose tokens have not been handed out."""
        self._beyond = b""
        """What the last token that was handed out has beyond the text so far."""
        self._follows = False
        """Whether the output before this place is text."""

    def add(self, entries: Sequence[TokenLogProb]) -> None:
        """Take the log-probs of the next token, or of those that have become text with it."""
        self._waiting += entries

    def leave(self) -> None:
        """Say that something else than text comes."""
        self._follows = False

    def take(self, text: str) -> list[TokenLogProb]:
        """Return the log-probs that go with the next piece of text: those of tokens with bytes of it."""
        taken, raw = self.rest(), text.encode()
        waiting = b"".join(entry.bytes for entry in self._waiting)
        ahead = self._beyond + waiting
        fits = self._owed or raw.startswith(ahead) or ahead.startswith(raw)
        if not self._follows or (not fits and raw in waiting):
            self._skip_to(raw, waiting)
        known = min(len(raw), len(self._beyond))
        self._beyond, self._owed, self._follows = self._beyond[known:], self._owed + len(raw) - known, True
        return taken + self.rest()

    def rest(self) -> list[TokenLogProb]:
        """Return the log-probs of text that has been taken, and whose tokens have come only now."""
        count = 0
        while count < len(self._waiting) and self._owed > 0:
            raw = self._waiting[count].bytes
            self._beyond, self._owed = raw[self._owed :], max(0, self._owed - len(raw))
            count += 1
        taken = self._waiting[:count]
        del self._waiting[:count]
        return taken

    def _skip_to(self, raw: bytes, waiting: bytes) -> None:
        """Drop what comes before a text, whose token may not have come whole; a token on the border is cut there."""
        self._beyond, self._owed = b"", 0
        place = waiting.rfind(raw)
        if place < 0:
            ends = range(max(0, len(waiting) - len(raw)), len(waiting) + 1)
            place = next(end for end in ends if raw.startswith(waiting[end:]))
        count = 0
        while count < len(self._waiting) and (place > 0 or not self._waiting[count].bytes):
            spelt = self._waiting[count].bytes
            if len(spelt) > place > 0:
                self._waiting[count] = replace(self._waiting[count], bytes=spelt[place:])
                break
            place -= len(spelt)
            count += 1
        del self._waiting[:count]
