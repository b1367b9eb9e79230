"""Sequence: a request while the engine works on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.errors import DeadlineExceeded

if TYPE_CHECKING:
    import numpy as np

    from inflight.engine.kv_cache import BlockTable
    from inflight.text.stops import StopTextLimit


@dataclass(eq=False)
class Sequence:
    """A request's tokens and how far they are computed."""

    request: Request
    order: int
    """Of arrival."""
    seed: int
    max_length: int
    """Prompt and output together."""
    stop_text: StopTextLimit | None
    tokens: list[int] = field(init=False)
    """Prompt, then what was generated."""
    computed: int = 0
    """How many of them have their keys and values in the cache."""
    table: BlockTable | None = None
    """None while it waits."""
    context_logits: list[np.ndarray] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.metrics.arrival_ns = self.request.arrival_ns
        self.metrics.prompt_tokens = len(self.tokens)

    @property
    def rank(self) -> tuple[int, int]:
        """What is served first: higher priority, then earlier arrival. Smaller is sooner."""
        return -self.request.priority, self.order

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether there is more to compute than one step's new token."""
        return self.remaining > 1

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; return why the sequence ends, if it does. An end id is not added."""
        sampling = self.request.sampling
        now = time.time_ns()
        self.metrics.first_token_ns = self.metrics.first_token_ns or now
        self.metrics.last_token_ns = now
        if token in sampling.end_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        self.tokens.append(token)
        self.metrics.generated_tokens += 1
        may_stop = self.generated >= sampling.min_tokens
        if self.stop_text is not None and self.stop_text.push(token, may_stop):
            return FinishReason.STOP
        if may_stop and self._ends_with_stop_sequence():
            return FinishReason.STOP
        if self.generated >= sampling.max_tokens or len(self.tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def overdue(self, now_ns: int) -> Output | None:
        """Return the last output of a sequence whose deadline has passed, or None."""
        deadline = self.request.deadline_ns
        if deadline is None or now_ns < deadline:
            return None
        if self.generated:
            return Output(self.request.key, finish_reason=FinishReason.DEADLINE)
        error = DeadlineExceeded("the request's deadline passed before its first token")
        return Output(self.request.key, error=error)

    def _ends_with_stop_sequence(self) -> bool:
        return any(
            len(stop) <= self.generated and tuple(self.tokens[-len(stop) :]) == stop
            for stop in self.request.sampling.stop_sequences
        )
