"""The requests whose guides are being compiled: they wait as those in the queue do, and enter it afterwards."""

from __future__ import annotations

from inflight.engine.guided.compiler import Compilation, GuideCompiler
from inflight.engine.guided.state import GuideState
from inflight.engine.request import Output
from inflight.engine.sequence import Sequence
from inflight.errors import InflightError

POLL_S = 0.001
"""How long the engine's thread sleeps between two looks where it has nothing else to do."""


class PendingGuides:
    """Sequences that wait for their guides, in the order of their arrival."""

    def __init__(self, compiler: GuideCompiler) -> None:
        self._compiler = compiler
        self._waiting: dict[Sequence, Compilation] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Have the guide of a sequence compiled."""
        guide = sequence.request.sampling.guide
        assert guide is not None
        self._waiting[sequence] = self._compiler.ask(guide)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that ends, if it waits here."""
        if (compilation := self._waiting.pop(sequence, None)) is not None:
            self._compiler.give_up(compilation)

    def clear(self) -> None:
        """Forget all."""
        for sequence in list(self._waiting):
            self.discard(sequence)

    def take(self, now_ns: int) -> list[tuple[Sequence, GuideState | Output]]:
        """Take out those whose wait is over: with their guide, or with the output that ends them."""
        over = []
        for sequence, compilation in list(self._waiting.items()):
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
        return None if result is None else GuideState(result, request.sampling)
