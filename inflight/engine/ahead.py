"""A step ahead: while a GPU computes a step, the next one is scheduled, put together and given to it.

What comes next is known but for the tokens that the step makes: prompts go on with their next chunks, sequences that
decode go on by one token each, and who waits joins. So the next step is launched with those tokens where they are, on
the device, before the host has seen them, and the host books a step's tokens while the next one runs. A sequence that
turns out to have ended has had a row too many. It is dropped, and its blocks are free at once: what the row stored lies
behind every token that is kept, and whoever gets the block stores there by a later step.

It knows no policy: ``Scheduler`` says what comes next, or that the step must be read first.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Rows
from typing import NamedTuple

from torch import Tensor

from inflight.engine.chunk import Chunk
from inflight.engine.kv_cache import BlockCopy
from inflight.engine.model_runner import ModelRunner
from inflight.engine.sampler import Choice, choose, needs_tokens
from inflight.engine.scheduler import Scheduler
from inflight.engine.speculate.verification import Continuation

_UNKNOWN = (-1,)
"""The token that the device has and the host has not."""


class Launched(NamedTuple):
    """A step that was launched and is not read yet."""

    chunks: list[Chunk]
    choice: Choice
    context: dict[int, Tensor]
    """Context logits by index of chunk."""


class Ahead:
    """Launches a step before the one before it is read."""

    def __init__(self, runner: ModelRunner, speculates: bool) -> None:
        """
        Args:
            runner: computes the steps.
            speculates: whether steps have drafts, which follow from tokens that the host must have.
        """
        self._runner = runner
        self._enabled = runner.overlaps and not speculates
        self._launched: Launched | None = None
        self.launches = 0
        """Steps launched ahead so far."""

    def resume(self, still_open: Container[int], scheduler: Scheduler) -> list[Chunk]:
        """Return the chunks of the step that was launched, but for sequences that have ended since; none: no step was.

        Args:
            still_open: keys of the requests that have not ended.
            scheduler: owns the sequences.
        """
        if self._launched is None:
            return []
        chunks, choice, context = self._launched
        kept = [index for index, chunk in enumerate(chunks) if chunk.sequence.request.key in still_open]
        if len(kept) < len(chunks):
            rows = {index: row for row, index in enumerate(_sampling(chunks))}
            choice.keep([rows[index] for index in kept if index in rows])
            context = {place: context[index] for place, index in enumerate(kept) if index in context}
            chunks = [chunks[index] for index in kept]
        self._launched = Launched(chunks, choice, context) if chunks else None
        scheduler.charge(chunks)
        return chunks

    def take(self) -> Launched | None:
        """Return the step that was launched, once; None: none was."""
        launched, self._launched = self._launched, None
        return launched

    def following(self, chunks: Rows[Chunk], scheduler: Scheduler) -> list[Chunk]:
        """Return the step after the one of ``chunks``, which is running; empty: that one must be read first."""
        return scheduler.schedule_after(chunks) if self._enabled and all(map(_is_simple, chunks)) else []

    def launch(self, following: list[Chunk], copies: Rows[BlockCopy], chunks: Rows[Chunk], choice: Choice) -> None:
        """Launch the step that follows the one of ``chunks``, which is running and makes ``choice``.

        Args:
            following: what to compute.
            copies: blocks to copy before.
            chunks: what is computed now.
            choice: its tokens.
        """
        rows = {chunks[index].sequence: row for row, index in enumerate(_sampling(chunks))}
        awaited = [rows[chunk.sequence] for chunk in following if chunk.awaits]
        # No number (-1) ends its sequence; until then it must not be looked up in the embedding.
        tokens = choice.of(awaited).clamp(min=0) if awaited else None
        logits, context = self._runner.run(following, copies, tokens)
        sampled = [
            Continuation(chunk.sequence, _UNKNOWN) if chunk.awaits else chunk.sequence
            for chunk in following
            if chunk.samples
        ]
        self._launched = Launched(following, choose(logits, sampled), context)
        self.launches += 1


def _sampling(chunks: Rows[Chunk]) -> list[int]:
    """Return which of the chunks have a row in the choice of their step."""
    return [index for index, chunk in enumerate(chunks) if chunk.samples]


def _is_simple(chunk: Chunk) -> bool:
    """Whether the token that it ends with, if any, decides what comes next only through the model."""
    sequence = chunk.sequence
    return not chunk.samples or (sequence.group is None and not needs_tokens(sequence.request.sampling))
