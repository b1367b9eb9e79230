"""Sequence: a request while the engine works on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inflight.engine.request import FinishReason, Output, Request, RequestMetrics
from inflight.errors import DeadlineExceeded

if TYPE_CHECKING:
    import numpy as np

    from inflight.engine.beam_group import BeamGroup
    from inflight.engine.kv_cache import BlockTable
    from inflight.text.stops import StopTextLimit

Rank = tuple[int, int, int]
"""What is served first; smaller is sooner. The last number is the order of arrival."""
_NEVER_NS = 1 << 62


def rank_of(request: Request, order: int, aging_ns: int | None) -> Rank:
    """Return where a request stands, from its arrival to its end.

    With aging, who is due first: a request is due at its deadline, and at the latest ``aging_ns`` after its arrival;
    each level of priority makes it due ``aging_ns`` sooner. Without, priorities are strict: among equals the earlier
    deadline, then the earlier arrival.
    """
    deadline = _NEVER_NS if request.deadline_ns is None else request.deadline_ns
    if aging_ns is None:
        return -request.priority, deadline, order
    return min(deadline, request.arrival_ns + aging_ns) - request.priority * aging_ns, 0, order


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
    rank: Rank = field(init=False)
    """Strict, unless its engine's priorities age."""
    tokens: list[int] = field(init=False)
    """Prompt, then what was generated."""
    computed: int = 0
    """How many of them have their keys and values in the cache."""
    computed_before: int = 0
    """How many were computed when it was last preempted; up to there its steps compute again."""
    charged: int = 0
    """How many were counted as served to its client, or came from the prefix cache."""
    counted: bool = False
    """Whether its first step has been counted."""
    table: BlockTable | None = None
    """None while it waits."""
    group: BeamGroup | None = None
    """The beams that it is one of."""
    context_logits: list[np.ndarray] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def __post_init__(self) -> None:
        self.rank = rank_of(self.request, self.order, None)
        self.tokens = list(self.request.prompt)
        self.metrics.arrival_ns = self.request.arrival_ns
        self.metrics.prompt_tokens = len(self.tokens)

    @property
    def longest(self) -> int:
        """Tokens that prompt and output can come to."""
        return longest(self.request, self.max_length)

    @property
    def leader(self) -> Sequence:
        """The sequence that stands for the request: itself, unless it is one of several beams."""
        return self if self.group is None else self.group.leader

    @property
    def members(self) -> list[Sequence]:
        """Those that come and go together: itself, or the beams of its request."""
        return [self] if self.group is None else self.group.members

    @property
    def places(self) -> int:
        """Places in the batch that it takes."""
        return 1 if self.group is None else self.group.places

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens that must be computed before the next one can be sampled; 1 while it decodes."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> FinishReason | None:
        """Add a sampled token; return why the sequence ends, if it does. An end id is not added."""
        sampling = self.request.sampling
        now = time.time_ns()
        if not self.metrics.first_token_ns:
            self.metrics.first_token_ns, self.metrics.prefill_steps = now, self.metrics.steps
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
        return None if deadline is None or now_ns < deadline else self.late()

    def late(self) -> Output:
        """Return the last output of a sequence that its deadline ends."""
        if self.metrics.first_token_ns:
            return Output(self.request.key, finish_reason=FinishReason.DEADLINE)
        error = DeadlineExceeded("the request's deadline passed before its first token")
        return Output(self.request.key, error=error)

    def _ends_with_stop_sequence(self) -> bool:
        return any(
            len(stop) <= self.generated and tuple(self.tokens[-len(stop) :]) == stop
            for stop in self.request.sampling.stop_sequences_by_last.get(self.tokens[-1], ())
        )


def longest(request: Request, max_length: int) -> int:
    """Return the tokens of prompt and output at most; ``max_length``: those that the engine allows."""
    return min(max_length, len(request.prompt) + request.sampling.max_tokens)
