"""Beam search: which continuations of a prompt live on, which are finished, and when the search is over.

The algorithm is that of transformers (``GenerationMixin._beam_search``), which TensorRT-LLM follows too
(``batchBeamKernel``). It knows tokens and log-probs; not tensors, blocks or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from inflight.engine.request import Beam, FinishReason
from inflight.sampling import SamplingParams

Candidates = Sequence[tuple[int, float]]
"""The likeliest next tokens of one beam with their log-probs, best first."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveBeam:
    """A continuation that is searched on: its last token, behind another one that it shares with its siblings."""

    before: LiveBeam | None = field(default=None, repr=False)
    """None: it has no token yet."""
    token: int = -1
    log_prob: float = 0.0
    cum_log_prob: float = 0.0
    length: int = 0
    """Tokens generated so far."""
    parent: int = 0
    """The place, among the beams before this step, of the one that it continues."""

    def last(self, count: int) -> list[LiveBeam]:
        """Return the beam as it was with each of its last ``count`` tokens, in their order."""
        beams: list[LiveBeam] = []
        beam: LiveBeam | None = self
        while beam is not None and beam.before is not None and len(beams) < count:
            beams.append(beam)
            beam = beam.before
        return beams[::-1]


class _Ended(NamedTuple):
    """A continuation that is not searched on. Its tokens are collected at the search's end only: most do not last."""

    beam: LiveBeam
    score: float
    reason: FinishReason


class BeamSearch:
    """The search for one prompt's most likely continuations."""

    def __init__(self, sampling: SamplingParams, max_tokens: int) -> None:
        """``max_tokens``: most tokens to generate, at most the request's own ``max_tokens``."""
        self.width = sampling.beam_width
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._end_ids = frozenset() if sampling.ignore_eos else sampling.end_ids
        self.live = [LiveBeam()]
        """Best first; at the start there is one, and from the first token on as many as the width."""
        self._finished: list[_Ended] = []
        self.done = False

    @property
    def started(self) -> bool:
        """Whether it has taken a step."""
        return self.done or self.live[0].length > 0

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Take a step with each live beam's candidates: ``num_candidates`` or all tokens of the vocabulary.

        Only the best ``width`` continuations can finish; those that do make room for the next best to live on.
        """
        ranked = sorted(
            (
                (beam.cum_log_prob + log_prob, place, token, log_prob)
                for place, (beam, tokens) in enumerate(zip(self.live, candidates, strict=True))
                for token, log_prob in tokens
            ),
            key=lambda one: (-one[0], *one[1:3]),
        )
        live: list[LiveBeam] = []
        for rank, (cum_log_prob, place, token, log_prob) in enumerate(ranked):
            before = self.live[place]
            beam = LiveBeam(before, token, log_prob, cum_log_prob, before.length + 1, place)
            reason = self._end_of(beam)
            if reason is None:
                live.append(beam)
                if len(live) == self.width:
                    break
            elif rank < self.width:
                self._finished.append(_Ended(beam, self._score(beam), reason))
        self._finished = self._best(self._finished)
        self.live = live
        self.done = not live or self._is_settled()

    def results(self, reason: FinishReason) -> list[Beam]:
        """Return the best beams, best first, as many as the width where there are so many.

        ``reason``: why the search ends, which is why those end that are not finished.
        """
        alive = [] if self.done else [_Ended(beam, self._score(beam), reason) for beam in self.live]
        return [self._given_out(ended) for ended in self._best([*self._finished, *alive])]

    def _end_of(self, beam: LiveBeam) -> FinishReason | None:
        """Return why a continuation ends with its last token, if it does."""
        if beam.token in self._end_ids:
            return FinishReason.STOP
        may_stop = beam.length >= self._sampling.min_tokens
        stops = self._sampling.stop_sequences_by_last.get(beam.token, ()) if may_stop else ()
        if any(tuple(one.token for one in beam.last(len(stop))) == stop for stop in stops):
            return FinishReason.STOP
        return FinishReason.LENGTH if beam.length >= self._max_tokens else None

    def _given_out(self, ended: _Ended) -> Beam:
        """Return a beam as it is given out: an end id counts in its score and is not among its tokens."""
        beam = ended.beam
        steps = beam.last(beam.length)
        if steps and beam.token in self._end_ids:
            steps.pop()
        tokens, log_probs = tuple(one.token for one in steps), tuple(one.log_prob for one in steps)
        return Beam(tokens, log_probs, beam.cum_log_prob, ended.score, ended.reason)

    def _score(self, beam: LiveBeam) -> float:
        """Return what beams are ranked by: the log-prob over the length to the power of the length penalty."""
        return beam.cum_log_prob / beam.length**self._sampling.length_penalty if beam.length else beam.cum_log_prob

    def _best(self, beams: list[_Ended]) -> list[_Ended]:
        return sorted(beams, key=attrgetter("score"), reverse=True)[: self.width]

    def _is_settled(self) -> bool:
        """Whether enough beams are finished, and what lives is not expected to become better than the worst of them.

        The expectation is that of the original: the best live beam, as if it ended now.
        """
        if len(self._finished) < self.width:
            return False
        return self._sampling.early_stopping or self._score(self.live[0]) <= self._finished[-1].score


def num_enders(sampling: SamplingParams) -> int:
    """Return how many different tokens can end a continuation."""
    ends = set() if sampling.ignore_eos else set(sampling.end_ids)
    return len(ends | {stop[-1] for stop in sampling.stop_sequences})


def num_candidates(sampling: SamplingParams) -> int:
    """Return how many of a beam's likeliest tokens must be known: even if all that could end do, enough go on."""
    return sampling.beam_width + num_enders(sampling)
