"""Overlap: while a GPU computes a step, the next one is scheduled, put together and launched.

What comes next is known but for the tokens that the step makes: prompts go on with their next chunks, sequences that
decode go on by one token each, and waiting ones join. So the next step is launched with those tokens where they are, on
the device, before the host has seen them, and the host books a step's tokens while the next one runs. A sequence that
turns out to have ended has had a row too many. It is dropped, and its blocks are free at once: what the row stored lies
behind every token that is kept, and whichever sequence gets the block stores there by a later step.

It knows no policy: ``Scheduler`` says what comes next, or that the step must be read first.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from torch import Tensor

from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.model_runner import ModelRunner
from inflight.engine.sampler import PendingSample, needs_tokens, sample_async
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Chunk, Continuation, Sequence


class LaunchedStep(NamedTuple):
    """A step that was launched and is not read yet."""

    chunks: list[Chunk]
    pending: PendingSample
    context: dict[int, Tensor]
    """Context logits by index of chunk."""

    @property
    def rows(self) -> dict[Sequence, int]:
        """The row of ``pending`` of each sequence that gets a token."""
        sampling = (chunk.sequence for chunk in self.chunks if chunk.samples)
        return {sequence: row for row, sequence in enumerate(sampling)}


class OverlapScheduler:
    """Launches a step before the one before it is read."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler) -> None:
        """``runner`` computes the steps, none of which has drafts; ``scheduler`` says what comes next."""
        self._runner = runner
        self._scheduler = scheduler
        self._launched: LaunchedStep | None = None
        self.launches = 0
        """Steps launched before the one before was read, so far."""

    def resume(self, still_open: Container[int]) -> list[Chunk]:
        """Return the chunks of the step that was launched, but for sequences that have ended since; none: no step was.

        ``still_open``: the keys of the requests that have not ended.
        """
        step = self._launched
        if step is None:
            return []
        kept = [index for index, chunk in enumerate(step.chunks) if chunk.sequence.request.key in still_open]
        chunks = [step.chunks[index] for index in kept]
        if len(kept) < len(step.chunks):
            rows = step.rows
            step.pending.keep([rows[chunk.sequence] for chunk in chunks if chunk.sequence in rows])
            context = {place: step.context[index] for place, index in enumerate(kept) if index in step.context}
            self._launched = LaunchedStep(chunks, step.pending, context) if chunks else None
        self._scheduler.charge(chunks)
        return chunks

    def take(self) -> LaunchedStep | None:
        """Return the step that was launched, once; None: none was."""
        launched, self._launched = self._launched, None
        return launched

    def following(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the step after the one of ``chunks``, which is running; empty: that one must be read first."""
        return self._scheduler.schedule(chunks) if all(map(_is_simple, chunks)) else []

    def launch(self, following: list[Chunk], copies: list[BlockCopy], running: LaunchedStep) -> None:
        """Launch the step that follows the running one, whose tokens it awaits; ``copies``: blocks to copy before."""
        rows = running.rows
        awaited = [rows[chunk.sequence] for chunk in following if chunk.awaits]
        # No number (-1) ends its sequence; until then it must not be looked up in the embedding.
        tokens = running.pending.of(awaited).clamp(min=0) if awaited else None
        logits, context = self._runner.run(following, copies, tokens)
        sampled = [
            Continuation(chunk.sequence, (-1,)) if chunk.awaits else chunk.sequence  # -1: the host has no token yet
            for chunk in following
            if chunk.samples
        ]
        self._launched = LaunchedStep(following, sample_async(logits, sampled), context)
        self.launches += 1


def _is_simple(chunk: Chunk) -> bool:
    """Whether the token that it ends with, if any, decides what comes next only through the model."""
    sampling = chunk.sequence.request.sampling
    return not chunk.samples or (sampling.beam_width == 1 and not needs_tokens(sampling))
