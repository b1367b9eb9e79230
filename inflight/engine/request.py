"""What goes into the engine and what comes out: the records that the stages and the engine exchange.

The records know nothing of Triton, of text or of how the engine works. Times are ``time.time_ns()``.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from inflight.engine.kv.retention import Retention
from inflight.errors import InflightError
from inflight.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. Every sequence ends exactly once, with one of these or with an error."""

    STOP = "stop"
    """An end id, a stop string or a stop sequence."""
    LENGTH = "length"
    """max_tokens, or the model's longest sequence."""
    CANCELLED = "cancelled"
    """The client went away or said stop."""
    DEADLINE = "deadline"
    """The request's deadline passed after its first token."""


def new_stream_key() -> int:
    """Return a key that no other stream has, and that nobody guesses."""
    return secrets.randbits(63)


@dataclass(slots=True)
class Request:
    """One sequence to generate. ``num_return_sequences`` and batches become several of these before the engine."""

    prompt: list[int]
    sampling: SamplingParams
    request_id: str = ""
    """The client's id: optional and not unique; only ``stop`` uses it."""
    priority: int = 0
    """Higher is served first."""
    lora: str | None = None
    """Name of the LoRA adapter to apply; None: the model as it is."""
    deadline_ns: int | None = None
    """Absolute ``time.time_ns()``; past it the request ends with DEADLINE, or, before its first token, with
    DeadlineExceeded."""
    client_id: str = ""
    """Whose it is: with ``batching.fairness: client`` clients take turns. Requests without one are one client's."""
    retention: Retention = ()
    """What its blocks are worth to the KV cache when it has ended."""
    key: int = field(default_factory=new_stream_key)
    """The stream's key: the engine gives it out and takes it back to cancel. Random, so that it cannot be guessed and
    does not come again after a restart."""
    arrival_ns: int = 0
    """Set when the request is submitted."""


@dataclass(slots=True)
class RequestMetrics:
    """What happened to a request: the contract's performance outputs."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    generated_tokens: int = 0
    new_blocks: int = 0
    reused_blocks: int = 0
    total_blocks: int = 0
    preemptions: int = 0
    steps: int = 0
    """Engine steps that computed a part of it; 0 where the engine does not count them."""
    prefill_steps: int = 0
    """Of them, those up to the first token."""
    draft_tokens: int = 0
    """Proposed by speculative decoding."""
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Beam:
    """One of the continuations that beam search gives out."""

    tokens: tuple[int, ...]
    """Generated; an end id that ended it is not among them."""
    log_probs: tuple[float, ...]
    """Natural log of each token's probability."""
    cum_log_prob: float
    """Their sum, with that of the end id that ended it."""
    score: float
    """What beams are ranked by: ``cum_log_prob`` over the length, end id included, to the power of the penalty."""
    finish_reason: FinishReason


@dataclass(slots=True)
class Output:
    """What one step (or several, joined) made for one sequence. The last one carries ``finish_reason`` or ``error``."""

    key: int
    tokens: list[int] = field(default_factory=list)
    """New tokens since the previous output; an end id that ended the sequence is not among them."""
    log_probs: list[float] | None = None
    """Natural log of each new token's probability; same length as ``tokens``, with ``sampling.log_probs``."""
    top_log_probs: list[list[tuple[int, float]]] | None = None
    """Per new token the most likely ones as (token, log-prob), best first, with ``sampling.top_log_probs``."""
    generation_logits: list[np.ndarray] | None = None
    """Per new token its raw logits, float32 ``[vocab]``."""
    context_logits: np.ndarray | None = None
    """float32 ``[prompt_len, vocab]``, once, with the first output that has tokens."""
    beams: list[Beam] | None = None
    """Of beam search, with the last output: the best first. ``tokens`` is empty then, and so is what goes with it."""
    text_limit: int | None = None
    """With stop strings: how many characters (code points) of the generated text may be shown so far, counted from
    its start. None: all of it."""
    finish_reason: FinishReason | None = None
    error: InflightError | None = None
    metrics: RequestMetrics | None = None
    """The engine's own record, which goes on until the last output."""

    @property
    def num_tokens(self) -> int:
        """New tokens, of all beams."""
        return len(self.tokens) + sum(len(beam.tokens) for beam in self.beams or ())

    @property
    def finished(self) -> bool:
        """Whether this is the sequence's last output."""
        return self.finish_reason is not None or self.error is not None
