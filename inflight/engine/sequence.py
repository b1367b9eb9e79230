"""Sequence: a request while an engine works on it: its tokens, block table, metrics and end.

Only this module changes a sequence's fields; the others call its methods. The block table belongs to the KV cache,
which alone writes what is in it. A beam search has one sequence per live beam: the leader, which stands for the
request, and its forks, which come and go with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from inflight.clock import now_ns
from inflight.engine.kvcache.blocks import BlockTable
from inflight.engine.prompt_outputs import PromptRecord
from inflight.engine.request import (
    FinishReason,
    Output,
    Request,
    RequestMetrics,
    SortKey,
    every_token_is_banned,
    longest,
    sort_key,
)
from inflight.engine.stats import EngineStats
from inflight.errors import DeadlineExceeded, EngineFailure, InflightError, InvalidRequest
from inflight.text.stops import StopTextLimit

if TYPE_CHECKING:  # it needs llguidance, and not every engine has guides
    from inflight.engine.guided.state import GuideState

NAN_LOGITS, ALL_BANNED = -1, -2
"""The values of ``Sampled.token`` where none could be sampled."""


@dataclass(slots=True)
class Sampled:
    """One sequence's next token, and what else its request asked for."""

    token: int
    """The token; below 0: none could be sampled, and ``error`` says why."""
    log_prob: float = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)
    of_ids: np.ndarray | None = None
    """float32 ``[m]``: the log-probs of ``log_prob_ids``."""
    logits: np.ndarray | None = None
    candidates: list[tuple[int, float]] = field(default_factory=list)
    """Of a beam: the likeliest tokens with their log-probs, best first, penalties and bans applied."""

    @property
    def error(self) -> InflightError | None:
        """The error that the sequence ends with if no token could be sampled."""
        if self.token >= 0:
            return None
        banned = self.token == ALL_BANNED
        return every_token_is_banned() if banned else EngineFailure("the model's logits are not numbers")


@dataclass(eq=False)
class Sequence:
    """One sequence of tokens: a request, or one beam of it."""

    request: Request
    order: int
    """The order of arrival."""
    seed: int
    """The seed of its random numbers: unsigned, 64 bits."""
    max_length: int
    """The engine's limit of prompt and output together."""
    stop_text: StopTextLimit | None
    aging_ns: int | None = None
    """The time of waiting that counts as much as one level of priority; None: priorities are strict."""
    sort_key: SortKey = field(init=False)
    tokens: list[int] = field(init=False)
    """The prompt, then what was generated."""
    table: BlockTable | None = field(default=None, init=False)
    """The blocks of the KV cache that it holds; None while it waits."""
    computed_before: int = field(default=0, init=False)
    """The most tokens that were computed at a preemption; its steps compute these again."""
    served_tokens: int = field(default=0, init=False)
    """The tokens that were counted as served to its client, or came from the prefix cache."""
    batch_rows: int = field(init=False)
    """How much of ``max_batch_size`` it takes: 1; the leader of a beam search has one per beam until it forks."""
    forks: list[Sequence] = field(default_factory=list, init=False)
    """The other live beams of the request, where this is the leader of a search that has forked."""
    prompt_record: PromptRecord = field(default_factory=PromptRecord, init=False)
    """What was computed of the prompt so far that the request asks for, until an output takes it."""
    guide: GuideState | None = field(default=None, init=False)
    """What its text must be, and how far it has come in it."""
    metrics: RequestMetrics = field(init=False)
    _leader: Sequence | None = field(default=None, init=False, repr=False)
    """The leader of the search, where this is a fork."""
    _counted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.sort_key = sort_key(self.request, self.order, self.aging_ns)
        self.tokens = list(self.request.prompt)
        self.batch_rows = self.request.sampling.beam_width
        self.metrics = RequestMetrics(self.request.arrival_ns, prompt_tokens=len(self.tokens))
        self.metrics.resumed_tokens = len(self.request.resumed_ids)

    @property
    def longest(self) -> int:
        """The most tokens that this request can reach: ``max_length``, or its prompt and ``max_tokens``."""
        return longest(self.request, self.max_length)

    @property
    def computed(self) -> int:
        """The tokens whose keys and values are in the cache."""
        return 0 if self.table is None else self.table.num_computed

    @property
    def generated(self) -> int:
        """The tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def reads_prompt(self) -> bool:
        """Whether each of the prompt's positions has yet to be computed, although it may be cached."""
        return self.request.sampling.reads_prompt and not self.generated

    @property
    def remaining(self) -> int:
        """The tokens that must be computed before the next one can be sampled; 1 while it decodes."""
        return len(self.tokens) - self.computed

    @property
    def leader(self) -> Sequence:
        """The sequence that stands for the request: itself, unless it is a fork of a beam search."""
        return self._leader or self

    @property
    def members(self) -> list[Sequence]:
        """The sequences that run and stop together: itself, or all beams of its request, the leader first."""
        leader = self.leader
        return [leader, *leader.forks]

    def resume(self, stats: EngineStats) -> InflightError | None:
        """Take over what an earlier run of the request has generated; return why it cannot go on behind it, if so."""
        request = self.request
        for place, token in enumerate(request.resumed_ids):
            if self._ends_with(token):
                return InvalidRequest(f"resumed_ids completes a stop word with token {place}; the answer ended there")
        if self.stop_text is not None:
            request.resumed_text_limit = self.stop_text.limit
        stats.resumed_requests += 1
        return None

    def give_place_up(self, now_ns: int) -> None:
        """Have it wait behind those that wait now: times are larger than the numbers by which others have come."""
        self.sort_key = sort_key(self.request, now_ns, self.aging_ns, now_ns)

    def obey(self, guide: GuideState) -> None:
        """Follow a guide from its first generated token on; it has those that were resumed already."""
        self.guide = guide

    def admit(self, table: BlockTable) -> None:
        """Begin to run, with the blocks of ``table``."""
        self.table = table
        self.served_tokens = max(self.served_tokens, table.num_computed)
        metrics = self.metrics
        if not metrics.first_scheduled_ns:
            metrics.first_scheduled_ns = now_ns()
            metrics.reused_blocks = table.reused_blocks
            metrics.cached_tokens = min(table.cached_tokens, metrics.prompt_tokens)

    def release(self) -> list[BlockTable]:
        """Stop running, with all beams; return the block tables, to be freed. They count in the request's metrics."""
        tables = [member.table for member in self.members if member.table is not None]
        for member in self.members:
            member.table = None
            member.prompt_record.clear()
        for table in tables:
            self.leader.count_blocks(table)
        return tables

    def count_blocks(self, table: BlockTable) -> None:
        """Count the blocks of a table of the request's that is given back."""
        metrics = self.metrics
        metrics.new_blocks += table.new_blocks
        metrics.total_blocks = metrics.new_blocks + metrics.reused_blocks
        prompt = [tokens for tokens in table.entered if tokens.stop <= metrics.prompt_tokens]
        written = sum(tokens.stop - max(tokens.start, table.cached_tokens) for tokens in prompt)
        metrics.written_tokens = (metrics.written_tokens or 0) + written

    def preempt(self) -> list[BlockTable]:
        """Stop running, to be computed again; return the block tables, to be freed. A beam search begins again."""
        self.computed_before = max(self.computed_before, *(member.computed for member in self.members))
        tables = self.release()
        self.metrics.preemptions += 1
        self.forks.clear()
        if self.request.sampling.beam_width > 1:
            self.tokens, self.batch_rows = list(self.request.prompt), self.request.sampling.beam_width
        return tables

    def fork(self) -> Sequence:
        """Add a beam to the leader of a search, and return it; ``continue_as`` gives it its blocks and tokens."""
        fork = Sequence(self.request, self.order, self.seed, self.max_length, None)
        fork._leader, fork.sort_key, fork._counted = self, self.sort_key, True
        fork.computed_before, fork.served_tokens = self.computed_before, self.served_tokens
        self.batch_rows = fork.batch_rows = 1
        self.forks.append(fork)
        return fork

    def continue_as(self, table: BlockTable, tokens: list[int]) -> None:
        """Take over the blocks and the tokens of a beam of the search, and continue it."""
        self.table, self.tokens = table, tokens
        self.served_tokens = max(self.served_tokens, table.num_computed)

    def replace_tail(self, start: int, tokens: list[int]) -> None:
        """Replace the tokens from index ``start`` on; of a draft model's twin alone, which follows its sequence."""
        self.tokens[start:] = tokens

    def count_served(self, end: int) -> int:
        """Count the tokens up to ``end`` as served to its client; return how many of them are new."""
        new = end - self.served_tokens
        if new <= 0:
            return 0
        self.served_tokens = end
        return new

    def count_scheduled(self, stats: EngineStats) -> None:
        """Count that a step computes a part of it, in ``stats`` the first time."""
        if not self._counted:
            self._counted = True
            stats.count_scheduled(self.metrics)

    def count_step(self) -> None:
        """Count a step that has computed some of its tokens."""
        self.metrics.steps += 1

    def count_drafts(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a step, and how many of them were right."""
        self.metrics.draft_tokens += drafted
        self.metrics.accepted_draft_tokens += accepted

    def count_generated(self, tokens: int) -> None:
        """Set how many tokens a search has generated: they are not in ``tokens`` before its beams are given out."""
        self.metrics.generated_tokens = tokens

    def stamp(self) -> int:
        """Record that a token was sampled now; return when the one before was, in nanoseconds, 0 if there was none."""
        metrics, now = self.metrics, now_ns()
        previous_ns, metrics.last_token_ns = metrics.last_token_ns, now
        if not metrics.first_token_ns:
            metrics.first_token_ns, metrics.prefill_steps = now, metrics.steps
        return previous_ns

    def advance(self, sampled: Iterable[Sampled], stats: EngineStats) -> Output:
        """Add what a step sampled, up to the sequence's end; return it as the step's output."""
        output = Output(self.request.key, metrics=self.metrics)
        for one in sampled:
            if one.token >= 0:
                before = len(self.tokens)
                output.finish_reason = self.append(one.token, stats)
                if len(self.tokens) > before:
                    _add_to_output(output, one, self.request)
                    if self.stop_text is not None:
                        output.text_limits = [*(output.text_limits or ()), self.stop_text.limit]
                if self.guide is not None:
                    output.error = self.guide.failure(self.generated, ended=output.finish_reason is not None)
            elif self.guide is None or one.token == NAN_LOGITS:
                output.error = one.error
            else:
                output.error, output.finish_reason = self.guide.without_token(self.generated), FinishReason.STOP
            if output.error is not None:
                output.finish_reason = None
            if output.finished:
                break
        if self.request.sampling.reads_prompt:
            self.prompt_record.fill(output)
        if self.stop_text is not None:
            output.text_limit = self.stop_text.limit
        return output

    def pooled_output(self) -> Output | None:
        """Return the last output of a request for an embedding, once its prompt is computed; None: it goes on."""
        if self.request.sampling.pooling is None or self.computed < len(self.request.prompt):
            return None
        output = Output(self.request.key, finish_reason=FinishReason.STOP)
        self.prompt_record.fill(output)
        return output

    def append(self, token: int, stats: EngineStats) -> FinishReason | None:
        """Add and count a sampled token; return why the sequence ends, if it does. An end id is not added."""
        sampling, previous_ns = self.request.sampling, self.stamp()
        if token in sampling.end_ids and not sampling.ignore_eos:
            stats.count_sampled(self.metrics, 0, previous_ns)
            return FinishReason.STOP
        if self.guide is not None:
            self.guide.push(token)
        self.metrics.generated_tokens += 1
        stats.count_sampled(self.metrics, 1, previous_ns)
        if self._ends_with(token):
            return FinishReason.STOP
        if self.guide is not None and self.guide.is_over():
            return FinishReason.STOP
        if self.generated >= sampling.max_tokens or len(self.tokens) >= self.max_length:
            return FinishReason.LENGTH
        return None

    def expiry_output(self) -> Output:
        """Return the last output of a sequence that its deadline ends."""
        if self.metrics.first_token_ns or self.generated:
            return Output(self.request.key, finish_reason=FinishReason.DEADLINE)
        error = DeadlineExceeded("the request's deadline passed before its first token")
        return Output(self.request.key, error=error)

    def _ends_with(self, token: int) -> bool:
        """Add a token; return whether it completes a stop string or a stop sequence."""
        self.tokens.append(token)
        may_stop = self.generated >= self.request.sampling.min_tokens
        if self.stop_text is not None and self.stop_text.push(token, may_stop):
            return True
        return may_stop and any(
            len(stop) <= self.generated and tuple(self.tokens[-len(stop) :]) == stop
            for stop in self.request.sampling.stop_sequences_by_last.get(self.tokens[-1], ())
        )


def _add_to_output(output: Output, sampled: Sampled, request: Request) -> None:
    """Add a new token, and what else the request asked for, to the output."""
    sampling = request.sampling
    output.tokens.append(sampled.token)
    if sampling.log_probs:
        output.log_probs = [*(output.log_probs or ()), sampled.log_prob]
    if sampling.top_log_probs:
        output.top_log_probs = [*(output.top_log_probs or ()), sampled.top]
    if sampled.of_ids is not None:
        output.token_log_probs = [*(output.token_log_probs or ()), sampled.of_ids]
    if sampled.logits is not None:
        output.generation_logits = [*(output.generation_logits or ()), sampled.logits]


@dataclass(frozen=True)
class Continuation:
    """A sequence as it would be with some drafts accepted. A drafted position is sampled for it."""

    sequence: Sequence
    drafts: tuple[int, ...]

    @property
    def request(self) -> Request:
        """The sequence's request."""
        return self.sequence.request

    @property
    def seed(self) -> int:
        """The sequence's seed."""
        return self.sequence.seed

    @property
    def generated(self) -> int:
        """Tokens generated before this position."""
        return self.sequence.generated + len(self.drafts)

    @property
    def guide(self) -> GuideState | None:
        """The sequence's guide as it would be behind the drafts."""
        guide = self.sequence.guide
        return None if guide is None else guide.ahead(self.drafts)

    @cached_property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens before this position."""
        return [*self.sequence.tokens, *self.drafts]


SamplingRow = Sequence | Continuation
"""What one row of logits is sampled for."""
