"""The requests whose guides are being compiled: they wait as those in the queue do, and enter it afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator

from inflight.engine.guided.compiler import Compilation, CompiledGuide, GuideCompiler
from inflight.engine.guided.state import GuideState
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.engine.request import Output, Request
from inflight.engine.sequence import Sequence
from inflight.errors import InflightError, InvalidRequest
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings
from inflight.text.tokenizer import Tokenizer

POLL_S = 0.001
"""How long the engine's thread sleeps between two looks where it has nothing else to do."""
_FOLLOW_S = 0.01
"""CPU time that guides may take to follow resumed tokens at each look, for which all other sequences wait: as much as
one mask may take on average by default."""


def pending_guides(tokenizer: Tokenizer, vocab_size: int, settings: GuidedDecodingSettings) -> PendingGuides:
    """Return what an engine's guided requests wait in; ``vocab_size``: the model's."""
    return PendingGuides(GuideCompiler(lambda: Vocabulary(tokenizer, vocab_size), settings))


class PendingGuides:
    """Sequences that wait for their guides, in the order of their arrival."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self.waiting: dict[Sequence, Compilation] = {}
        """Those that wait. The engine looks at this alone while nobody does."""
        self._following: dict[Sequence, Iterator[GuideState | Output | None]] = {}
        """What takes the guides of those that are resumed to where they broke off."""
        self._until_s = 0.0
        """When they have to leave the engine's thread to the others, by its CPU time."""

    def warm_up(self) -> None:
        """Have the guide of any JSON compiled, which starts the process that checks guides; nothing waits for it."""
        self._compiler.ask(Guide("json", ""))

    def add(self, sequence: Sequence) -> None:
        """Have the guide of a sequence compiled."""
        guide = sequence.request.sampling.guide
        assert guide is not None
        self.waiting[sequence] = self._compiler.ask(guide, sequence.request.client_id)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that ends, if it waits here."""
        self._following.pop(sequence, None)
        if (compilation := self.waiting.pop(sequence, None)) is not None:
            self._compiler.give_up(compilation)

    def take(self, now_ns: int) -> list[tuple[Sequence, GuideState | Output]]:
        """Take out those whose wait is over: with their guide, or with the output that ends them."""
        over = []
        self._until_s = time.thread_time() + _FOLLOW_S
        for sequence, compilation in list(self.waiting.items()):
            outcome = self._outcome(sequence, compilation, now_ns)
            if outcome is not None:
                self.discard(sequence)
                over.append((sequence, outcome))
        return over

    def _outcome(self, sequence: Sequence, compilation: Compilation, now_ns: int) -> GuideState | Output | None:
        request = sequence.request
        if request.deadline_ns is not None and request.deadline_ns <= now_ns:
            return sequence.expiry_output()
        result = self._compiler.result(compilation)
        if isinstance(result, InflightError):
            return Output(request.key, error=result)
        if result is None:
            return None
        if sequence not in self._following:
            self._following[sequence] = self._follow(result, request)
        return next(self._following[sequence])

    def _follow(self, compiled: CompiledGuide, request: Request) -> Iterator[GuideState | Output | None]:
        """Yield None as often as the time is over; then the guide behind what an earlier run of the request has
        generated, or the output that refuses it."""
        state = GuideState(compiled, request.sampling)
        for place, token in enumerate(request.resumed_ids):
            while time.thread_time() > self._until_s:
                yield None
            if not state.follow(token):
                told = f"resumed_ids has token {token} at {place}; guided_decoding_guide does not allow it there"
                yield Output(request.key, error=InvalidRequest(told))
            elif (error := state.too_slow(place + 1)) is not None:
                yield Output(request.key, error=error)
        if state.is_over():
            told = "resumed_ids completes guided_decoding_guide; the answer ended there"
            yield Output(request.key, error=InvalidRequest(told))
        yield state
