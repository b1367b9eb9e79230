"""Which log-probs belong to the text of a response: those of reasoning and of calls do not."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.gateway.log_probs import TokenLogProb


class TextLogProbs:
    """Hands out the log-probs of the text, in step with it. All of them, joined, do not depend on the steps."""

    def __init__(self) -> None:
        self._waiting: list[TokenLogProb] = []
        self._seen = 0
        """Tokens that have come."""
        self._bytes = 0
        """Bytes of text that have no log-probs yet."""

    def add(self, entries: Sequence[TokenLogProb], reasoning_tokens: int) -> None:
        """Take the next log-probs; the first ``reasoning_tokens`` of all belong to the reasoning."""
        first = min(max(0, reasoning_tokens - self._seen), len(entries))
        self._seen += len(entries)
        self._waiting += entries[first:]

    def take(self, text: str) -> list[TokenLogProb]:
        """Return the log-probs that go with the next piece of text: those whose bytes it completes."""
        self._bytes += len(text.encode())
        count = 0
        while count < len(self._waiting) and len(self._waiting[count].bytes) <= self._bytes:
            self._bytes -= len(self._waiting[count].bytes)
            count += 1
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken
