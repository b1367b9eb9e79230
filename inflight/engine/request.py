"""The records that the stages and the engine exchange, Request and Output, and the checks of requests.

The records know nothing of Triton, of text or of how the engine works. Times are ``inflight.clock.now_ns()``.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from inflight.clock import now_ns
from inflight.engine.kvcache.retention import Retention
from inflight.errors import InflightError, InvalidRequest, UnsupportedFeature
from inflight.sampling import SamplingParams, asked_beside

_BESIDE_POOLING = ("pooling", "max_tokens", "end_ids")
"""The parameters that a request for an embedding may have; the ensemble sends the last two with each request."""
_NOT_RESUMED = ("beam_width", "context_logits", "prompt_log_probs")
_BESIDE_RESUMED = frozenset(part.name for part in fields(SamplingParams)) - set(_NOT_RESUMED)
"""The parameters that a resumed request may have."""


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
    """Return a key that no other stream has and that nobody can guess."""
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
    """Absolute ``inflight.clock.now_ns()``; past it the request ends with DEADLINE, or, before its first token, with
    DeadlineExceeded."""
    client_id: str = ""
    """Whose it is: clients take turns with their guides and, with ``batching.fairness: client``, in the queue. Requests
    without one are one client's."""
    retention: Retention = ()
    """The retention priorities of its blocks in the KV cache once it has ended."""
    key: int = field(default_factory=new_stream_key)
    """The stream's key: the engine gives it out and takes it back to cancel. Random, so that it cannot be guessed and
    does not come again after a restart."""
    resumed_ids: list[int] = field(default_factory=list)
    """What an earlier run of this request has generated: the sequence goes on behind it, as that run would have."""
    resumed_log_prob: float = 0.0
    """The sum of their log-probs, with ``sampling.log_probs``."""
    arrival_ns: int = 0
    """Set when the request is submitted."""
    seed: int | None = None
    """The seed of its random numbers, which an engine that samples sets when the request is submitted."""
    resumed_text_limit: int | None = None
    """With stop strings: how many characters of the text of ``resumed_ids`` could be shown; set then too."""

    def begin(self) -> int:
        """Set when it was submitted, unless that is known, and its seed, which is drawn unless it asks for one."""
        self.arrival_ns = self.arrival_ns or now_ns()
        self.seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed
        return self.seed


@dataclass(slots=True)
class RequestMetrics:
    """The times and counts of a request: the contract's performance outputs."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    written_tokens: int | None = None
    """Other prompt tokens, in whole blocks that are new to the prefix cache; None: the engine does not say."""
    resumed_tokens: int = 0
    """Tokens that an earlier run of the request has generated."""
    generated_tokens: int = 0
    """By this run."""
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


class PromptScores(NamedTuple):
    """Of a prompt of ``n`` tokens: each position has the log-probs of what follows it, of which there are n - 1."""

    log_probs: np.ndarray
    """float32 ``[n - 1]``: of the prompt's own tokens but the first."""
    top_ids: np.ndarray
    """int32 ``[n - 1, k]``: the likeliest tokens, best first."""
    top_log_probs: np.ndarray
    """float32 ``[n - 1, k]``."""


@dataclass(frozen=True, slots=True)
class Beam:
    """One of the continuations that beam search returns."""

    tokens: tuple[int, ...]
    """Generated; an end id that ended it is not among them."""
    log_probs: tuple[float, ...]
    """Natural log of each token's probability."""
    cum_log_prob: float
    """Their sum, with that of the end id that ended it."""
    score: float
    """The rank of the beam: ``cum_log_prob`` over the length, end id included, to the power of the penalty."""
    finish_reason: FinishReason


@dataclass(slots=True)
class Output:
    """A sequence's output of one step, or of several steps joined. The last has ``finish_reason`` or ``error``."""

    key: int
    tokens: list[int] = field(default_factory=list)
    """New tokens since the previous output; an end id that ended the sequence is not among them."""
    log_probs: list[float] | None = None
    """Natural log of each new token's probability; same length as ``tokens``, with ``sampling.log_probs``."""
    top_log_probs: list[list[tuple[int, float]]] | None = None
    """Per new token the most likely ones as (token, log-prob), best first, with ``sampling.top_log_probs``."""
    generation_logits: list[np.ndarray] | None = None
    """Per new token its raw logits, float32 ``[vocab]``."""
    token_log_probs: list[np.ndarray] | None = None
    """Per new token the log-probs at its position of ``sampling.log_prob_ids``, float32 ``[m]``."""
    context_logits: np.ndarray | None = None
    """float32 ``[prompt_len, vocab]``, once, with the first output that has tokens."""
    prompt_scores: PromptScores | None = None
    """With ``sampling.prompt_log_probs``, once, with the first output that has tokens."""
    embedding: np.ndarray | None = None
    """float32 ``[hidden]``, with ``sampling.pooling``: with the last output, which is the only one."""
    beams: list[Beam] | None = None
    """Of beam search, with the last output: the best first. ``tokens`` is empty then, and so is what goes with it."""
    text_limit: int | None = None
    """With stop strings: how many characters (code points) of the generated text may be shown so far, counted from
    its start. None: all of it."""
    text_limits: list[int] | None = None
    """Per new token what ``text_limit`` is behind it, where the engine knows."""
    finish_reason: FinishReason | None = None
    error: InflightError | None = None
    metrics: RequestMetrics | None = None
    """The engine's own record, which it updates until the last output."""

    @property
    def num_tokens(self) -> int:
        """New tokens, of all beams."""
        return len(self.tokens) + sum(len(beam.tokens) for beam in self.beams or ())

    @property
    def finished(self) -> bool:
        """Whether this is the sequence's last output."""
        return self.finish_reason is not None or self.error is not None

    def extend(self, other: Output) -> None:
        """Join the sequence's next output to this one."""
        for name in _PARTS_OF_OUTPUT:
            known, new = getattr(self, name), getattr(other, name)
            if known is not None and name in PER_TOKEN:
                known += new or ()
            elif new is not None:
                setattr(self, name, new)


PER_TOKEN = {"tokens", "log_probs", "top_log_probs", "generation_logits", "token_log_probs", "text_limits"}
"""The fields of an output that have one element for each token."""
_GUIDE = "guided_decoding_guide_type"
_PARTS_OF_OUTPUT = tuple(part.name for part in fields(Output))


SortKey = tuple[int, int, int]
"""The order in which sequences are served; smaller is sooner. The last number is the order of arrival."""
_NEVER_NS = 1 << 62


def sort_key(request: Request, order: int, aging_ns: int | None, since_ns: int | None = None) -> SortKey:
    """Return a request's place in the order of service, which it keeps from its arrival to its end.

    One that has given its place up has the one that it would have, had it arrived then (``since_ns``).

    With aging, the request that is due first is served first: a request is due at its deadline, and at the latest
    ``aging_ns`` after its arrival; each level of priority makes it due ``aging_ns`` sooner. Without aging, priorities
    are strict: among equals the earlier deadline goes first, then the earlier arrival.
    """
    deadline = _NEVER_NS if request.deadline_ns is None else request.deadline_ns
    if aging_ns is None:
        return -request.priority, deadline, order
    return min(deadline, (since_ns or request.arrival_ns) + aging_ns) - request.priority * aging_ns, 0, order


def longest(request: Request, max_length: int) -> int:
    """Return the most tokens of prompt and output; ``max_length``: those that the engine allows."""
    return min(
        max_length, len(request.prompt) + (request.sampling.max_tokens if request.sampling.pooling is None else 0)
    )


def check_request(request: Request, vocab_size: int, max_length: int) -> None:
    """Check a request against the model; safe to call from any thread.

    Token ids are below ``vocab_size``; prompt and output have ``max_length`` tokens together at most.

    Raises:
        InvalidRequest: naming the field, the value and the limit.
        UnsupportedFeature: naming the field.
    """
    if not request.prompt:
        raise InvalidRequest("input_ids is empty; it must have at least one token")
    if len(request.prompt) > max_length - (request.sampling.pooling is None):  # a token must follow
        raise InvalidRequest(
            f"input_ids: the prompt length ({len(request.prompt)} tokens) exceeds the limit; "
            f"prompt and output may have {max_length} tokens together"
        )
    sampling = request.sampling
    named = {
        "input_ids": request.prompt,
        "resumed_ids": request.resumed_ids,
        "embedding_bias": list(sampling.logit_bias),
        "log_prob_token_ids": sampling.log_prob_ids,
        "bad_words_list": [token for bad in sampling.bad_sequences for token in bad],
    }
    for name, tokens in named.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidRequest(f"{name} has token {wrong}; it must be between 0 and {vocab_size - 1}")
    if sampling.pooling is not None:
        for name in asked_beside(sampling, _BESIDE_POOLING):
            raise UnsupportedFeature(f"{name} is not supported with pooling, which generates nothing")
    if request.resumed_ids:
        _check_resumed(request, max_length)
    banned = {bad[0] for bad in sampling.bad_sequences if len(bad) == 1}
    banned |= {token for token, bias in sampling.logit_bias.items() if bias == -math.inf}
    if len(banned) == vocab_size:
        raise every_token_is_banned()


def _check_resumed(request: Request, max_length: int) -> None:
    """Check that a request can have come so far and go on. Raises as ``check_request`` does."""
    sampling, count = request.sampling, len(request.resumed_ids)
    for name in asked_beside(sampling, _BESIDE_RESUMED):
        raise UnsupportedFeature(f"{name} is not supported with resumed_ids")
    if count >= (most := longest(request, max_length) - len(request.prompt)):
        raise InvalidRequest(f"resumed_ids has {count} tokens; it must have fewer than the {most} that the answer may")
    ends = () if sampling.ignore_eos else sampling.end_ids
    if (end := next((token for token in request.resumed_ids if token in ends), None)) is not None:
        raise InvalidRequest(f"resumed_ids has token {end}, which is an end id; the answer ended with it")


def every_token_is_banned() -> InvalidRequest:
    """Return the error of a request whose bans leave no token to sample, now or later."""
    return InvalidRequest(
        "embedding_bias, bad_words_list and min_tokens ban every token that could come next; they must leave one"
    )


def check_portable(request: Request, has_tokenizer: bool, keeps_blocks: bool, has_head: bool) -> None:
    """Check that the portable engine, with its tokenizer, cache and model, serves what a request asks for.

    Raises:
        UnsupportedFeature: naming what it does not serve.
        InvalidRequest: there are stop strings, and no tokenizer to find them with.
    """
    if not has_head and request.sampling.pooling is None:
        raise UnsupportedFeature("this checkpoint has no output head (lm_head): it gives embeddings, and no text")
    if request.lora:
        raise UnsupportedFeature("lora_name is not supported by the portable engine")
    if request.retention and not keeps_blocks:
        raise UnsupportedFeature("retention_* is not supported by this deployment; set `kv_cache.prefix_reuse: true`")
    for name, given in (("stop_strings", request.sampling.stop_strings), (_GUIDE, request.sampling.guide)):
        if given and not has_tokenizer:
            raise InvalidRequest(f"{name}: this engine has no tokenizer")


def check_guide(request: Request, vocab_size: int, max_bytes: int) -> None:
    """Check what can be seen of a request's guide before it is compiled.

    Raises:
        UnsupportedFeature: it has a guide beside beams.
        InvalidRequest: it is larger than ``max_bytes``, or begins behind what is no token or ends the text.
    """
    sampling = request.sampling
    guide = sampling.guide
    if guide is None:
        return
    if sampling.beam_width > 1:
        raise UnsupportedFeature(f"{_GUIDE} is not supported beside beam_width above 1")
    if (size := len(guide.text.encode())) > max_bytes:
        raise InvalidRequest(f"guided_decoding_guide has {size} bytes; the limit is {max_bytes}")
    if (wrong := next((token for token in guide.start_ids if not 0 <= token < vocab_size), None)) is not None:
        raise InvalidRequest(f"guide_start_ids has token {wrong}; it must be between 0 and {vocab_size - 1}")
    if (end := next((token for token in guide.start_ids if token in sampling.end_ids), None)) is not None:
        raise InvalidRequest(f"guide_start_ids has token {end}, which is an end id; the guide could never begin")
