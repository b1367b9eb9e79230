"""Which log-probs belong to the text of a response: those of reasoning and of calls do not."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.gateway.log_probs import TokenLogProb


class TextLogProbs:
    """Hands out the log-probs of the text, in step with it. All of them, joined, do not depend on the steps."""

    def __init__(self) -> None:
        self._waiting: list[TokenLogProb] = []
        self._bytes = 0
        """Bytes of text without log-probs; below 0 where the last token goes beyond the text so far."""
        self.begun = False
        """Whether there has been text."""

    def add(self, entries: Sequence[TokenLogProb]) -> None:
        """Take the next log-probs of the output."""
        self._waiting += entries

    def take(self, text: str, reasoning_tokens: int) -> list[TokenLogProb]:
        """Return the log-probs that go with the next piece of text: those whose bytes begin in it.

        Args:
            text: the piece.
            reasoning_tokens: how many tokens of the output came before all text.
        """
        raw = text.encode()
        if not self.begun:
            self.begun = True
            self._skip(reasoning_tokens, raw)
        self._bytes += len(raw)
        count = 0
        while count < len(self._waiting) and self._bytes > 0:
            self._bytes -= len(self._waiting[count].bytes)
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def _skip(self, reasoning_tokens: int, raw: bytes) -> None:
        """Drop what came before the text: the reasoning, and white space between it and the text."""
        del self._waiting[:reasoning_tokens]
        while reasoning_tokens and self._waiting and not self._waiting[0].bytes.strip():
            space = self._waiting[0].bytes
            if raw.startswith(space) or space.startswith(raw):
                return
            del self._waiting[0]
