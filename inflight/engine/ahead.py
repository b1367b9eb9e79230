"""A step ahead: while a GPU computes a step, the next one is scheduled, put together and given to it.

What sequences that decode do next is known but for their tokens: each goes on by one. So the next step is launched with
the tokens where they are, on the device, before the host has seen them, and the host books a step's tokens while the
next one runs. A sequence that turns out to have ended has had a row too many. It is dropped, and its blocks are free at
once: what the row stored lies behind every token that is kept, and whoever gets the block stores there by a later step.

It knows no policy: where there may be more to do than to go on decoding, no step is launched ahead, and ``Scheduler``
says what comes once the tokens are there. So it schedules nothing but books that are complete.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Rows

from inflight.engine.chunk import Chunk
from inflight.engine.kv_cache import KvCache
from inflight.engine.model_runner import ModelRunner
from inflight.engine.sampler import Choice, choose, needs_tokens
from inflight.engine.scheduler import Scheduler
from inflight.engine.speculate.verification import Continuation

_UNKNOWN = (-1,)
"""The token that the device has and the host has not."""


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
        self._launched: tuple[list[Chunk], Choice] | None = None
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
        launched, choice = self._launched
        kept = [row for row, chunk in enumerate(launched) if chunk.sequence.request.key in still_open]
        if len(kept) < len(launched):
            choice.keep(kept)
        chunks = [launched[row] for row in kept]
        self._launched = (chunks, choice) if chunks else None
        scheduler.charge(chunks)
        return chunks

    def take(self) -> Choice | None:
        """Return what the step that was launched has chosen, once; None: no step was."""
        launched, self._launched = self._launched, None
        return None if launched is None else launched[1]

    def launch(self, chunks: Rows[Chunk], choice: Choice, scheduler: Scheduler, cache: KvCache) -> None:
        """Launch the step after the one of ``chunks``, which is running and makes ``choice``, where that can be."""
        following = self._following(chunks, scheduler, cache) if self._enabled else []
        if not following:
            return
        rows = {chunk.sequence: row for row, chunk in enumerate(chunks)}
        tokens = choice.of([rows[chunk.sequence] for chunk in following])
        # No number (-1) ends its sequence; until then it must not be looked up in the embedding.
        logits = self._runner.run_ahead(following, tokens.clamp(min=0), cache.take_copies())
        self._launched = following, choose(logits, [Continuation(one.sequence, _UNKNOWN) for one in following])
        self.launches += 1

    def _following(self, chunks: Rows[Chunk], scheduler: Scheduler, cache: KvCache) -> list[Chunk]:
        """Return the next step, should no sequence end that need not, and take its blocks; empty: it is not known."""
        if len(chunks) < len(scheduler.running) or scheduler.admits or not all(map(_is_simple, chunks)):
            return []
        following = [
            Chunk(one.sequence, one.start + one.size, 1)
            for one in chunks
            if len(one.sequence.tokens) + 1 < one.sequence.longest
        ]
        if scheduler.num_waiting and (len(following) < len(chunks) or any(chunk.prefills for chunk in chunks)):
            return []  # who waits may have the place, or share the prompt that was just computed
        return following if all(_grow(cache, chunk) for chunk in following) else []


def _is_simple(chunk: Chunk) -> bool:
    """Whether a chunk ends with one token, of which the next one depends only through the model."""
    sequence = chunk.sequence
    return chunk.samples and sequence.group is None and not needs_tokens(sequence.request.sampling)


def _grow(cache: KvCache, chunk: Chunk) -> bool:
    table = chunk.sequence.table
    return table is not None and cache.grow(table, chunk.start + chunk.size)
