"""Generation: what the engine sends, as the text, the calls of tools, the reasoning and the log-probs of each choice.

Every endpoint that generates goes through ``run``, whether its answer is streamed or not: a whole answer is the stream,
collected. What a choice says, joined, does not depend on how the engine cut it into responses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from inflight.errors import InflightError
from inflight.gateway.context import Gateway
from inflight.gateway.engine_client import EngineDelta, GenerateRequest, pairs
from inflight.gateway.log_probs import LogProbStream, TokenLogProb
from inflight.gateway.request_errors import request_error
from inflight.gateway.shown_stops import ShownStops
from inflight.gateway.workers import off_loop
from inflight.text.output.events import CallStart, OutputEvent
from inflight.text.output.format import ChatFormat
from inflight.text.output.markers import MarkedDetokenizer, Marker, Piece
from inflight.text.output.tools import Tool, ToolChoice
from inflight.text.tokenizer import Tokenizer

_LOG_PROBS_AT_ONCE = 512
"""Log-probs, or tokens without any, that are read in one go: a millisecond or two of the event loop's thread."""
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt, and how what the engine makes of it is read."""

    request: GenerateRequest
    format: ChatFormat
    """Reads calls and reasoning; that of a completion is the plain one."""
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice.none)
    reasoning_open: bool = False
    """Whether the prompt ends inside the reasoning."""
    has_form: bool = False
    """Whether the guide has a form of the answer, so that an answer has no calls in it."""
    show_special: bool = False
    """Whether special tokens are shown as text."""
    show_stop: bool = False
    """Whether the stop string that ends a choice is shown."""
    shown_stops: tuple[str, ...] = ()
    """Stop strings that are looked for in the answer alone: its prompt lets the model think. The engine has none."""
    by_token: bool = False
    """Whether what comes is yielded token by token, however the engine sends it."""
    prompt_param: str = "prompt"
    guide_param: str = ""
    """The fields of the prompt and of the guide, which errors name."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engine counts them."""

    prompt_tokens: int
    completion_tokens: int
    """Tokens of all choices."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache had; known at the end."""
    written_tokens: int | None = None
    """Tokens of the prompt that were written to the prefix cache; None: not known, or not yet."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probs of a prompt."""

    log_probs: list[float]
    """Log-probs of its tokens but the first."""
    top: list[list[tuple[int, float]]]
    """At each of these the likeliest tokens, the best first."""


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new of one choice."""

    index: int
    events: list[OutputEvent]
    log_probs: list[TokenLogProb]
    token_ids: list[int]
    usage: Usage
    """Tokens of all choices so far, as far as the engine has told: parts of one response have the same."""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """With the end: the stop string that ended it, or ``deadline``."""
    prompt_scores: PromptScores | None = None
    """Where log-probs of the prompt were asked for; the same with each delta."""
    first_token_s: float | None = None
    """Seconds that the engine took for the first token; each part of an answer that is not streamed has them."""
    cut_call: bool = False
    """With the end: whether the arguments of a call are not complete, and so no JSON."""


async def run(gateway: Gateway, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
    """Generate, and yield what comes of each choice; closing the generator cancels all of them at once.

    Raises:
        ApiError: the engine's error, by the names of the request's fields.
    """
    choices = [_Choice(gateway.tokenizer, job, index) for index in range(job.request.sequences)]
    sample = gateway.quality and gateway.quality.sample(job.request)
    deltas = gateway.engine.generate(sample.request if sample else job.request)
    scores: PromptScores | None = None
    waiting: list[EngineDelta] = []
    size = 1 if job.by_token or job.shown_stops else max(1, _LOG_PROBS_AT_ONCE // (1 + job.request.top_log_probs))
    try:
        async for delta in deltas:
            if sample:
                sample.take(delta)
            scores = scores or await _prompt_scores(delta)
            waiting.append(delta)
            if job.request.prompt_log_probs is not None and scores is None:
                continue  # they come with one of the choices, and belong before all of them
            for one in waiting:
                choice = choices[one.index]
                choice.count(one)
                for number, part in enumerate(_parts(one, size)):
                    if number:
                        await asyncio.sleep(0)  # others have their turn in between
                    if not choice.stopped:
                        yield choice.push(part, partial(_usage, job.request.prompt, choices), scores)
                if sample and choice.stopped:
                    sample.end(one.index)
            waiting.clear()
            if all(choice.stopped for choice in choices):
                return
    except InflightError as error:
        raise request_error(error, job.prompt_param, job.guide_param, job.request.guide) from error
    finally:
        await deltas.aclose()


def _parts(delta: EngineDelta, size: int) -> Iterator[EngineDelta]:
    """Yield a delta as deltas of ``size`` tokens each, of which the last one ends as the whole does."""
    places = range(0, len(delta.tokens) - size, size)
    for place in places:
        yield replace(
            delta,
            tokens=delta.tokens[place : place + size],
            log_probs=delta.log_probs[place : place + size],
            top_log_probs=delta.top_log_probs[place : place + size],
            finish_reason=None,
        )
    rest = len(places) * size
    last = {name: getattr(delta, name)[rest:] for name in ("tokens", "log_probs", "top_log_probs")}
    yield replace(delta, **last) if rest else delta


async def _prompt_scores(delta: EngineDelta) -> PromptScores | None:
    given = delta.outputs.get("prompt_log_probs")
    if given is None:
        return None

    def read() -> PromptScores:
        top = pairs(delta.outputs, "prompt_top_log_prob_ids", "prompt_top_log_probs")
        return PromptScores(given.reshape(-1).tolist(), top)

    return await off_loop(read, sum(array.size for array in delta.outputs.values()))


def _usage(prompt: Sequence[int], choices: Sequence[_Choice]) -> Usage:
    cached = min(choice.cached_tokens for choice in choices)
    known = [choice.written_tokens for choice in choices if choice.written_tokens is not None]
    # What was evicted meanwhile, and computed once more, is written twice.
    written = min(sum(known), len(prompt) - cached) if known else None
    return Usage(len(prompt), sum(choice.output_tokens for choice in choices), cached, written)


class _Choice:
    """The state of one choice."""

    def __init__(self, tokenizer: Tokenizer, job: Job, index: int) -> None:
        self._job, self._index = job, index
        self._markers = job.format.markers
        shown = frozenset(tokenizer.special_tokens.values()) if job.show_special else frozenset()
        self._detokenizer = MarkedDetokenizer(tokenizer, self._markers | shown)
        self._parser = job.format.parser(job.tools, reasoning_open=job.reasoning_open, has_form=job.has_form)
        self._log_probs = LogProbStream(tokenizer, job.show_special) if job.request.log_probs else None
        self._characters = 0
        """Length of the text shown so far, without markers."""
        self._called = False
        self._stops = ShownStops(job.shown_stops, job.show_stop) if job.shown_stops else None
        self._taken = self.output_tokens = self.cached_tokens = 0
        self.written_tokens: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it, while the engine may go on."""
        return self._stops is not None and self._stops.found is not None

    def count(self, delta: EngineDelta) -> None:
        """Count what the engine says of its tokens; those behind a stop string are not the answer's."""
        if self.stopped:
            return
        self.output_tokens = max(self.output_tokens, delta.output_tokens)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.written_tokens = delta.written_tokens

    def push(self, delta: EngineDelta, usage: Callable[[], Usage], scores: PromptScores | None) -> ChoiceDelta:
        """Take a response of the engine; ``usage`` returns the tokens of all choices."""
        ends = delta.finish_reason is not None
        pieces = self._detokenizer.push(delta.tokens, delta.text_limit)
        stop: str | None = None
        if ends:
            pieces += self._detokenizer.finish(delta.text_limit)
            stop = self._stop_string() if delta.finish_reason == "stop" else None
            if stop and self._job.show_stop:
                pieces.append(stop)
        self._characters += sum(len(piece) for piece in pieces if isinstance(piece, str))
        events = self._parser.push([self._visible(piece) for piece in pieces])
        if ends:
            events += self._parser.finish(cut=delta.finish_reason != "stop")
        reason = delta.finish_reason
        self._taken += len(delta.tokens)
        if self._stops is not None:
            may_stop = self._taken >= self._job.request.min_tokens
            events = self._stops.take(events, ends=ends, may_stop=may_stop)
            if self._stops.found is not None:
                ends, reason, stop, self.output_tokens = True, "stop", self._stops.found, self._taken
        self._called = self._called or any(isinstance(event, CallStart) for event in events)
        entries = self._entries(delta, ends)
        why = "deadline" if reason == "deadline" else stop
        cut = ends and self._parser.has_open_call
        end, first = self._finish_reason(reason), delta.first_token_s
        return ChoiceDelta(self._index, events, entries, delta.tokens, usage(), end, why, scores, first, cut_call=cut)

    def _visible(self, piece: Piece) -> Piece:
        """Return a special token that is shown, and that the parser does not know, as its text."""
        if isinstance(piece, Marker) and piece.token not in self._markers:
            return piece.text
        return piece

    def _entries(self, delta: EngineDelta, ends: bool) -> list[TokenLogProb]:
        if self._log_probs is None:
            return []
        self._log_probs.push(delta.tokens, delta.log_probs, delta.top_log_probs)
        shown = self._characters - (self._stops.held if self._stops else 0)
        return self._log_probs.finish(shown) if ends else self._log_probs.take(shown)

    def _stop_string(self) -> str | None:
        """Return the stop string that ended the choice; None: it was a token."""
        hidden = self._detokenizer.hidden
        found = [stop for stop in self._job.request.stop_strings if hidden.startswith(stop)]
        return min(found, key=len, default=None)

    def _finish_reason(self, reason: str | None) -> FinishReason | None:
        if reason is None:
            return None
        if reason != "stop":
            return "length"  # the deadline too: what there is has been cut off
        calls = self._called and not self._parser.has_open_call
        return "tool_calls" if calls and self._job.choice.kind in ("auto", "required") else "stop"
