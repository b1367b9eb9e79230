"""The speculator adds drafts to a step's chunks where they pay, and learns from what comes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from inflight.engine.chunk import Chunk
from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.manager import KvCacheManager
from inflight.engine.model_runner import ModelRunner
from inflight.engine.request import Output
from inflight.engine.sequence import Sequence
from inflight.engine.speculate.controller import Controller
from inflight.engine.speculate.draft_model import DraftModel
from inflight.engine.speculate.ngram import NgramDrafter
from inflight.engine.speculate.verification import ancestry, merge, walk

log = logging.getLogger(__name__)


class Drafter(Protocol):
    """Guesses the next tokens of sequences; it keeps state for each sequence until ``forget``.

    A wrong guess costs time, and never changes a token.
    """

    def prepare(self, wanted: Mapping[Sequence, int]) -> None:
        """Take over the sequences' new tokens; the time for it is not counted as time for drafting."""

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[list[int]]]:
        """Return guesses for the sequences that were prepared, the likeliest first; a sequence may have none.

        ``wanted``: how many tokens to draft for each sequence at most; at least 1.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence, if anything is."""

    def reset(self) -> None:
        """Drop what is kept of all sequences, in whatever state it is."""

    def check_idle(self) -> None:
        """Assert that nothing is kept; it is called when no sequence is left."""


class Speculator:
    """Drafts for the sequences that decode, within the token budget and the blocks that the scheduler has left over."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        """``config`` has a method of speculation; ``runner`` computes the target's steps.

        Raises:
            DeploymentError: the draft model cannot be used.
        """
        self._settings, self._runner = config.speculation, runner
        self._max_tokens = config.max_tokens_per_step
        own = self._settings
        by_model = own.method == "draft_target"
        assert by_model or own.method == "ngram"
        self._drafter: Drafter | None = (
            DraftModel(config, runner) if by_model else NgramDrafter(own.max_ngram_size, own.candidates)
        )
        """None: it has failed, and nothing is drafted any more."""
        self.reset_controller()

    def draft_with(self, drafter: Drafter) -> None:
        """Draft with another drafter from now on; measurements use one whose acceptance they set."""
        self._drafter = drafter
        self.reset_controller()

    def reset_controller(self) -> None:
        """Forget the measured times and chances: the first steps of a process are slow."""
        settings = self._settings
        self.controller = Controller(settings.max_draft_tokens, settings.adaptive, settings.candidates)

    def add_drafts(self, chunks: list[Chunk], cache: KvCacheManager) -> list[Chunk]:
        """Return a step's chunks with drafts. Where drafting fails, the requests go on without speculation."""
        if self._drafter is None:
            return chunks
        try:
            drafts = self._draft(self._drafter, chunks)
        except Exception:
            log.exception("drafting failed; speculation is off until the server starts again")
            self._drafter, drafts = None, {}
        return [
            self._with_drafts(chunk, drafts[chunk.sequence], cache) if chunk.sequence in drafts else chunk
            for chunk in chunks
        ]

    def _draft(self, drafter: Drafter, chunks: list[Chunk]) -> dict[Sequence, list[list[int]]]:
        limits = {chunk.sequence: _limit(chunk) for chunk in chunks if _decodes(chunk)}
        tokens = sum(chunk.size for chunk in chunks)
        wanted = self.controller.lengths(limits, tokens, sum(chunk.samples for chunk in chunks))
        wanted = _within(wanted, (self._max_tokens - tokens) // self._settings.candidates)
        if not wanted:
            return {}
        drafter.prepare(wanted)
        started = time.perf_counter()
        drafts = drafter.draft(wanted)
        lengths = [len(guesses[0]) for guesses in drafts.values() if guesses]
        self.controller.observe_drafting(lengths, time.perf_counter() - started)
        return drafts

    def _with_drafts(self, chunk: Chunk, guesses: list[list[int]], cache: KvCacheManager) -> Chunk:
        """Return the chunk with as many drafts as there are blocks for; no sequence is preempted for drafts."""
        table, end = chunk.sequence.table, chunk.start + chunk.size
        assert table is not None
        if (guide := chunk.sequence.guide) is not None:  # what it forbids would only be computed in vain
            guesses = [guess[: guide.allowed_prefix(guess)] for guess in guesses]
        drafts, parents = merge(guesses, min(_limit(chunk), self._settings.most_drafts))
        if not cache.grow(table, end + len(drafts)):
            room = len(table.blocks) * cache.block_size - end
            drafts, parents = drafts[:room], parents[:room]
        return chunk._replace(size=chunk.size + len(drafts), drafts=drafts, parents=parents)

    def observe(self, chunks: list[Chunk], seconds: float) -> None:
        """Learn the seconds of a step of the target. Steps that prefill cost less per token, and are left out."""
        if self._drafter is not None and not any(chunk.prefills for chunk in chunks):
            self.controller.step_time.observe(sum(chunk.size for chunk in chunks), seconds)

    def commit_accepted(self, chunk: Chunk, output: Output, cache: KvCacheManager) -> None:
        """Commit the accepted drafts of a chunk, whose sequence has the output's tokens already.

        Their keys and values are moved to their positions if other branches of the tree lie between them. Those of
        rejected drafts are not committed, and later tokens overwrite them.
        """
        sequence, path = chunk.sequence, walk(chunk.drafts, chunk.parents, output.tokens)
        first, accepted = sequence.computed, len(path)
        moves = [(first + node, first + place) for place, node in enumerate(path) if node != place]
        if moves and sequence.table is not None:
            self._runner.move(sequence.table, moves)
        if output.error is None and sequence.table is not None:
            cache.commit(sequence.table, sequence.tokens, first + accepted)
        sequence.count_drafts(len(chunk.drafts), accepted)
        longest = max(len(ancestry(chunk.parents, node)) for node in range(len(chunk.parents)))
        self.controller.count(sequence, longest, accepted)

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        if self._drafter is not None:
            self._drafter.forget(sequence)
        self.controller.forget(sequence)

    def reset(self) -> None:
        """Drop what is kept of all sequences, in whatever state it is."""
        if self._drafter is not None:
            self._drafter.reset()
        self.reset_controller()

    def check_idle(self) -> None:
        """Check that nothing is kept of sequences that have ended, as ``Drafter.check_idle`` does."""
        if self._drafter is not None:
            self._drafter.check_idle()


def _decodes(chunk: Chunk) -> bool:
    """Whether a chunk may have drafts: it decodes, and is no beam, of whose next tokens all are followed anyway."""
    return chunk.samples and chunk.size == 1 and chunk.sequence.request.sampling.beam_width == 1


def _limit(chunk: Chunk) -> int:
    """Return how many drafts can be of use: a step samples one token more, and the last token is never computed."""
    sequence = chunk.sequence
    return sequence.longest - len(sequence.tokens) - 1


def _within(wanted: dict[Sequence, int], room: int) -> dict[Sequence, int]:
    """Cut the wanted drafts to ``room`` tokens in all, the longest first: a draft's first tokens are the likeliest."""
    while sum(wanted.values()) > max(0, room):
        most = min(max(wanted.values()) - 1, room // len(wanted))
        wanted = {one: min(length, most) for one, length in wanted.items() if most > 0}
    return wanted
