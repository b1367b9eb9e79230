"""How many tokens of an output are reasoning."""

from __future__ import annotations

from inflight.gateway.generation import ChoiceDelta, Job
from inflight.gateway.log_probs import token_bytes
from inflight.text.output.events import ReasoningDelta
from inflight.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts the tokens of one output up to the one with which what ends its reasoning is complete.

    Where an answer follows reasoning that nothing such ended, what counts is how many tokens its text has by itself. So
    the number at the end does not depend on how the engine cut the output.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ends = job.format.answer_start(tokenizer) if job.format.has_reasoning else ()
        self._end = b"".join(token_bytes(tokenizer, token, show_special=True) for token in ends)
        self._last = b""
        """The end of what has come, shorter than what ends the reasoning."""
        self._text: list[str] = []
        self._tokens = 0
        self._ended = self._answers = False

    def add(self, delta: ChoiceDelta) -> None:
        """Take what is new of the output."""
        for event in delta.events:
            if isinstance(event, ReasoningDelta):
                self._text.append(event.text)
            else:
                self._answers = True
        for token in () if self._ended else delta.token_ids:
            self._tokens += 1
            self._last += token_bytes(self._tokenizer, token, show_special=True)
            if self._end and self._end in self._last:
                self._ended = True
                return
            self._last = self._last[max(0, len(self._last) - len(self._end) + 1) :]

    @property
    def count(self) -> int:
        """Tokens of reasoning so far."""
        if not self._text:
            return 0
        if self._ended or not self._answers:
            return self._tokens
        return len(self._tokenizer.encode_batch(["".join(self._text)], add_special_tokens=False)[0])
