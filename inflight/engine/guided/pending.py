"""The requests whose guides are being compiled: they wait as those in the queue do, and enter it afterwards."""

from __future__ import annotations

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


def pending_guides(tokenizer: Tokenizer, vocab_size: int, settings: GuidedDecodingSettings) -> PendingGuides:
    """Return what an engine's guided requests wait in; ``vocab_size``: the model's."""
    return PendingGuides(GuideCompiler(lambda: Vocabulary(tokenizer, vocab_size), settings))


class PendingGuides:
    """Sequences that wait for their guides, in the order of their arrival."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self.waiting: dict[Sequence, Compilation] = {}
        """Those that wait. The engine looks at this alone while nobody does."""

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
        if (compilation := self.waiting.pop(sequence, None)) is not None:
            self._compiler.give_up(compilation)

    def take(self, now_ns: int) -> list[tuple[Sequence, GuideState | Output]]:
        """Take out those whose wait is over: with their guide, or with the output that ends them."""
        over = []
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
        return None if result is None else _guide_state(result, request)


def _guide_state(compiled: CompiledGuide, request: Request) -> GuideState | Output:
    """Return the guide behind what an earlier run of the request has generated, or the output that refuses it."""
    state = GuideState(compiled, request.sampling)
    for place, token in enumerate(request.resumed_ids):
        if not state.follow(token):
            told = f"resumed_ids has token {token} at {place}; guided_decoding_guide does not allow it there"
            return Output(request.key, error=InvalidRequest(told))
    if state.is_over():
        told = "resumed_ids completes guided_decoding_guide; the answer ended there"
        return Output(request.key, error=InvalidRequest(told))
    return state
