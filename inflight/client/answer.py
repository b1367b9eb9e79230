"""What comes back: a server's health, chunks of a stream, and the completion that they add up to.

Knows nothing of transports: these hand over ``Outputs``, the tensors of one response by name, flattened to lists.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from inflight.errors import EngineFailure

_PADDING = -1.0
"""What upstream puts behind the log-probs of a beam that is shorter than the others."""
Outputs = Mapping[str, list[Any]]
"""The output tensors of one response: name to its values in row-major order; BYTES as ``str``."""


class Health(Enum):
    """What a server says of itself over one protocol."""

    READY = "ready"
    LOADING = "loading"
    NO_MODEL = "no model"
    """It is ready, but the model that was asked for is not."""
    SILENT = "silent"
    """Nothing at this address speaks the protocol."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts so far; None where the request did not ask for them."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, taken from the prefix cache."""


Likeliest = tuple[tuple[tuple[int, float], ...], ...]
"""For each position the likeliest tokens as (token id, log-prob), best first."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What some requests ask for beside, or in place of, an answer's text. What was not asked for is empty."""

    prompt_log_probs: tuple[float, ...] = ()
    """The log-probs of the prompt's tokens but the first, with ``num_prompt_log_probs``."""
    prompt_top_log_probs: Likeliest = ()
    """The likeliest tokens in the place of each."""
    token_log_probs: tuple[tuple[float, ...], ...] = ()
    """Per new token the log-probs of ``log_prob_token_ids`` at its position."""
    embedding: tuple[float, ...] = ()
    """The prompt's, with ``pooling``; it is not normalized."""

    def joined(self, more: Scores | None) -> Scores:
        """Return these, with those of the next response behind them."""
        if more is None:
            return self
        return Scores(
            self.prompt_log_probs + more.prompt_log_probs,
            self.prompt_top_log_probs + more.prompt_top_log_probs,
            self.token_log_probs + more.token_log_probs,
            self.embedding + more.embedding,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream."""

    text: str
    """New text only."""
    index: int = 0
    """Which of ``num_return_sequences``."""
    finish_reason: str | None = None
    """The last chunk of a sequence has one: ``stop``, ``length``, ``cancelled`` or ``deadline``."""
    usage: Usage = Usage()
    start: int | None = None
    """Where the text starts and ends in the generated text, in code points."""
    end: int | None = None
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] = ()
    """The log-probs of the new tokens, with ``return_log_probs``."""
    top_log_probs: Likeliest = ()
    """Per new token the likeliest ones as (token id, log-prob), with ``num_top_log_probs``."""
    scores: Scores | None = None
    """What else was asked for: log-probs of the prompt and of given tokens, or an embedding."""
    token_ids: tuple[int, ...] = ()
    """The new tokens, with ``return_token_ids`` or where streams are resumed."""
    used_seed: int | None = None
    """What a sampled sequence is sampled by, in its first chunk, with ``return_token_ids``."""
    other_beams: tuple[Completion, ...] = ()
    """The beams after the best one, with ``beam_width``; the best one's text and log-probs are the chunk's."""
    outputs: Outputs = field(default_factory=dict, repr=False)
    """All tensors of the response, the performance outputs among them."""


def read_chunk(outputs: Outputs, top_log_probs: int = 0, log_prob_ids: int = 0) -> Chunk:
    """Return the chunk that one response carries; the numbers are those requested, to group flattened tensors.

    Raises EngineFailure: its tensors do not go together, as those of another server may.
    """

    def first(name: str) -> Any:
        return next(iter(outputs.get(name, ())), None)

    try:
        index = int(first("sequence_index") or 0)
        grouped = _likeliest(outputs, "top_log_prob", top_log_probs)
        scores = _scores(outputs, log_prob_ids)
        best, *others = _beams(outputs)
    except (TypeError, ValueError) as error:
        raise EngineFailure(f"a response is not one of Inflight's: {error}") from error
    usage = Usage(*map(first, ("num_input_tokens", "num_output_tokens", "num_cached_tokens")))
    return Chunk(
        best.text, index, first("finish_reason") or None, usage, start=first("text_start"), end=first("text_end"),
        cum_log_prob=best.cum_log_prob, log_probs=best.log_probs, top_log_probs=grouped, scores=scores,
        token_ids=tuple(outputs.get("token_ids", ())), used_seed=first("used_seed"), other_beams=tuple(others),
        outputs=outputs,
    )  # fmt: skip


def _groups(values: Sequence[Any], width: int) -> tuple[tuple[Any, ...], ...]:
    """Return flattened values in rows of ``width``."""
    return tuple(tuple(values[at : at + width]) for at in range(0, len(values), max(width, 1)))


def _likeliest(outputs: Outputs, name: str, width: int) -> Likeliest:
    """Return the likeliest tokens of each position, which two tensors have flattened. Raises ValueError."""
    return _groups(list(zip(outputs.get(f"{name}_ids", ()), outputs.get(f"{name}s", ()), strict=True)), max(width, 1))


def _scores(outputs: Outputs, log_prob_ids: int) -> Scores | None:
    """Return what a response has of them; None: nothing. Raises ValueError."""
    names = ("prompt_log_probs", "token_log_probs", "embedding")
    prompt, of_given, embedding = (tuple(outputs.get(name, ())) for name in names)
    width = len(outputs.get("prompt_top_log_probs", ())) // max(len(prompt), 1)
    scores = Scores(
        prompt, _likeliest(outputs, "prompt_top_log_prob", width), _groups(of_given, log_prob_ids), embedding
    )
    return scores if scores != Scores() else None


def _beams(outputs: Outputs) -> list[Completion]:
    """Return what a response has of each beam, the best first; without beam search there is one."""
    texts = outputs.get("text_output", ()) or [""]
    cums = outputs.get("cum_log_probs", ()) or [None] * len(texts)
    flat = outputs.get("output_log_probs", ())
    count = len(flat) // len(texts)
    rows = [list(flat[place * count : (place + 1) * count]) for place in range(len(texts))]
    for row in rows if len(rows) > 1 else ():
        while row and row[-1] == _PADDING:
            row.pop()
    each = zip(texts, cums, rows, strict=True)
    return [Completion(text, cum_log_prob=cum, log_probs=tuple(row)) for text, cum, row in each]


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, or what had arrived of it when it was cancelled."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage = Usage()
    cum_log_prob: float | None = None
    log_probs: tuple[float, ...] = ()
    top_log_probs: Likeliest = ()
    scores: Scores = Scores()
    """What else was asked for: log-probs of the prompt and of given tokens, or an embedding."""
    token_ids: tuple[int, ...] = ()
    used_seed: int | None = None
    outputs: Outputs = field(default_factory=dict, repr=False)
    """The tensors of the last response."""
    alternatives: tuple[Completion, ...] = ()
    """The other sequences, with ``num_return_sequences``, or the other beams, the best first, with ``beam_width``."""
    first_chunk_seconds: float | None = None
    """The time from the call to the first chunk, retries included."""
    seconds: float = 0.0
    """The time from the call to the last chunk."""


@dataclass(slots=True)
class _Sequence:
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: int | None = None
    completion: Completion = field(default_factory=Completion)

    def add(self, chunk: Chunk) -> None:
        if self.end is not None and chunk.start is not None and chunk.start != self.end:
            what = "is missing" if chunk.start > self.end else "has come twice"
            raise EngineFailure(f"a chunk of the stream {what}: text up to {self.end}, then from {chunk.start}")
        self.parts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.end = chunk.end
        so_far, usage = self.completion, self.completion.usage
        self.completion = replace(
            so_far,
            finish_reason=chunk.finish_reason or so_far.finish_reason,
            usage=Usage(
                _newer(chunk.usage.input_tokens, usage.input_tokens),
                _newer(chunk.usage.output_tokens, usage.output_tokens),
                _newer(chunk.usage.cached_tokens, usage.cached_tokens),
            ),
            cum_log_prob=_newer(chunk.cum_log_prob, so_far.cum_log_prob),
            log_probs=so_far.log_probs + chunk.log_probs,
            top_log_probs=so_far.top_log_probs + chunk.top_log_probs,
            scores=so_far.scores.joined(chunk.scores),
            used_seed=_newer(chunk.used_seed, so_far.used_seed),
            outputs=chunk.outputs,
            alternatives=chunk.other_beams,
        )

    def whole(self) -> Completion:
        """Return what has been added up."""
        return replace(self.completion, text="".join(self.parts), token_ids=tuple(self.token_ids))


def _newer(new: Any, old: Any) -> Any:
    return old if new is None else new


class Collector:
    """Adds chunks up to a completion, and checks that the stream has no gap or overlap and came to its end."""

    def __init__(self, sequences: int = 1) -> None:
        self._expected = sequences
        self.chunks = 0
        """How many have come."""
        self._sequences = {0: _Sequence()}
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = 0.0

    def add(self, chunk: Chunk) -> None:
        """Take one chunk in.

        Raises:
            EngineFailure: if text before it is missing, if its own has come before, or if it is of a sequence that was
                not asked for.
        """
        self.chunks += 1
        self._last = time.perf_counter() - self._started
        self._first = self._last if self._first is None else self._first
        if chunk.index >= self._expected:
            raise EngineFailure(f"sequence_index is {chunk.index}; {self._expected} sequences were asked for")
        self._sequences.setdefault(chunk.index, _Sequence()).add(chunk)

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self.chunks > 0

    def unfinished(self) -> dict[int, Completion]:
        """Return what has come of each sequence that has no finish reason yet, by its index."""
        so_far = {index: self._sequences.get(index, _Sequence()).whole() for index in range(self._expected)}
        return {index: one for index, one in so_far.items() if one.finish_reason is None}

    @property
    def complete(self) -> bool:
        """Whether every sequence has its finish reason."""
        ended = [each for each in self._sequences.values() if each.completion.finish_reason]
        return len(ended) == self._expected

    def completion(self) -> Completion:
        """Return what has been collected so far."""
        in_order = (self._sequences[index] for index in sorted(self._sequences))
        first, *others = (each.whole() for each in in_order)
        alternatives = (*others, *first.alternatives)
        return replace(first, alternatives=alternatives, first_chunk_seconds=self._first, seconds=self._last)
