"""How many tokens of an output are reasoning, counted token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from inflight.gateway.generation import ChoiceDelta, Job
from inflight.text.output.events import ReasoningDelta
from inflight.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts the tokens up to the end of the reasoning, and those that end it."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._end: Sequence[int] = job.format.guide_start(tokenizer) if job.format.has_reasoning else ()
        self._last: deque[int] = deque(maxlen=len(self._end))
        self._reasons, self._ended, self._tokens = job.reasoning_open, not job.format.has_reasoning, 0

    @property
    def count(self) -> int:
        """Tokens of reasoning so far."""
        return self._tokens if self._reasons else 0

    def add(self, delta: ChoiceDelta) -> None:
        """Take what is new of the output."""
        reasons = any(isinstance(event, ReasoningDelta) for event in delta.events)
        self._reasons = self._reasons or reasons
        if self._ended or (not self._end and not reasons and delta.events):
            self._ended = True
            return
        for token in delta.token_ids:
            self._tokens += 1
            self._last.append(token)
            if self._end and tuple(self._last) == tuple(self._end):
                self._ended = True
                return
