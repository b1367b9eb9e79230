"""Overlap scheduling: while a GPU computes a step, the next one is scheduled and launched.

Only the tokens that the running step samples are unknown on the host. The next step takes them from the device, and the
host reads and processes a step's tokens while the next one runs. A sequence may turn out to have ended with the running
step; its row in the next one is then dropped. Its blocks can be freed at once: the row has stored its keys and values
behind all tokens that are kept, and a sequence that gets such a block later stores there in a later step.

The policy is the scheduler's: ``Scheduler.schedule`` says what comes next, or that the running step must be read first.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from inflight.engine.chunk import Chunk
from inflight.engine.kvcache.blocks import BlockCopy
from inflight.engine.model_runner import ModelRunner
from inflight.engine.prompt_outputs import PromptPart
from inflight.engine.sampler import PendingSample, needs_tokens
from inflight.engine.scheduler import Scheduler
from inflight.engine.sequence import Continuation, Sequence


class LaunchedStep(NamedTuple):
    """A step that was launched and whose tokens the host has not read."""

    chunks: list[Chunk]
    pending: PendingSample
    parts: dict[int, PromptPart]
    """What requests ask of their prompts, by index of chunk."""

    @property
    def rows(self) -> dict[Sequence, int]:
        """For each sequence that gets a token, its row in ``pending``."""
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
        """How many steps were launched before the step before them was read."""

    def take(self, still_open: Container[int]) -> LaunchedStep | None:
        """Hand over the launched step, without the sequences that have ended since; None: there is none left.

        ``still_open``: the keys of the requests that have not ended.
        """
        step, self._launched = self._launched, None
        if step is None:
            return None
        kept = [index for index, chunk in enumerate(step.chunks) if chunk.sequence.request.key in still_open]
        chunks = [step.chunks[index] for index in kept]
        if len(kept) < len(step.chunks):
            rows = step.rows
            step.pending.keep([rows[chunk.sequence] for chunk in chunks if chunk.sequence in rows])
            parts = {place: step.parts[index] for place, index in enumerate(kept) if index in step.parts}
            step = LaunchedStep(chunks, step.pending, parts)
        self._scheduler.charge(chunks)
        return step if chunks else None

    def following(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks of the step after the running one of ``chunks``; empty: that one must be read first."""
        return self._scheduler.schedule(chunks) if all(map(_next_step_is_known, chunks)) else []

    def launch(self, following: list[Chunk], copies: list[BlockCopy], running: LaunchedStep) -> None:
        """Launch the step that follows the running one and takes its tokens; ``copies``: blocks to copy first."""
        rows = running.rows
        awaited = [rows[chunk.sequence] for chunk in following if chunk.awaits]
        # NaN logits sample -1, which ends the sequence when it is read. The embedding must not look it up before.
        tokens = running.pending.of(awaited).clamp(min=0) if awaited else None
        logits, parts = self._runner.run(following, copies, tokens)
        sampled = [
            Continuation(chunk.sequence, (-1,)) if chunk.awaits else chunk.sequence  # -1: the host has no token yet
            for chunk in following
            if chunk.samples
        ]
        self._launched = LaunchedStep(following, self._runner.sample(logits, sampled), parts)
        self.launches += 1


def _next_step_is_known(chunk: Chunk) -> bool:
    """Whether the next step needs the sampled token, if there is one, only as the model's input.

    Beam search and the sampling parameters that look at earlier tokens need it on the host.
    """
    sampling = chunk.sequence.request.sampling
    return not chunk.samples or (sampling.beam_width == 1 and not needs_tokens(sampling))
