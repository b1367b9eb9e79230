"""The controller decides how many tokens to draft for whom, so that tokens come faster than without drafts; often none.

A draft is worth its time when the chance that it is accepted exceeds the tokens that the engine makes in that time
without it. The chance is learnt for each sequence, from what came of its drafts; the time is learnt from the steps:
a step's seconds are nearly a line over its tokens, whose slope is what one more token costs. A step of many sequences
has few seconds to spare for each of its tokens, so that a large batch turns speculation off by itself.
The controller does not depend on the method of drafting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from inflight.engine.sequence import Sequence

_MEMORY = 0.01
"""The weight of the newest step in the averages, which remember some hundred steps."""
_FADING = 0.97
"""The weight of older drafts' outcomes is multiplied by this with each step."""
_PRIOR_WEIGHT = 4.0
"""The prior chance weighs as much as the outcome of so many drafts."""
_TRIAL, _TRIED = 32, 8
"""One of ``_TRIAL`` decisions is reversed, for one of ``_TRIED`` sequences, so that both choices stay measured."""
_OUTLIER = 2.0
"""A step that takes more than so many times the usual was disturbed, and counts as so many times the usual."""
_FIRST = 16
"""After so many steps the line can be trusted."""


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft is accepted whose predecessors were accepted."""

    accepted: float = 0.0
    tried: float = 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """Count a step's drafts; those behind the first rejected one were not tried."""
        self.fade()
        self.accepted += accepted
        self.tried += min(drafted, accepted + 1)

    def fade(self) -> None:
        """Give earlier outcomes less weight: they say less and less of the next ones."""
        self.accepted *= _FADING
        self.tried *= _FADING

    def chance(self, prior: float) -> float:
        """Return the chance, overestimated where it is uncertain, so that drafts are tried and their chance is learnt.

        ``prior``: the chance that is assumed before there are outcomes.
        """
        weight = self.tried + _PRIOR_WEIGHT
        mean = (self.accepted + _PRIOR_WEIGHT * prior) / weight
        return mean + 0.5 * math.sqrt(mean * (1 - mean) / weight)


@dataclass(slots=True)
class StepTime:
    """The seconds of a step as a line over its tokens, by least squares in which older steps weigh less.

    A step may be disturbed by whatever else the machine does, and take many times as long. After ``_FIRST`` steps, a
    step counts as a multiple of it at most; until then, as the fastest step of as many tokens or more at most.
    """

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0
    covariance: float = 0.0
    _first: list[tuple[float, float]] = field(default_factory=list)

    def observe(self, tokens: float, seconds: float) -> None:
        """Learn from a step of so many tokens, at least one."""
        if self.steps >= _FIRST:
            self._learn(tokens, min(seconds, _OUTLIER * max(self.seconds, self.of(tokens))))
            return
        self._first.append((tokens, seconds))
        self.steps, self.tokens, self.seconds, self.variance, self.covariance = 0, 0.0, 0.0, 0.0, 0.0
        for size, _ in self._first:
            self._learn(size, min(other for as_many, other in self._first if as_many >= size))

    def _learn(self, tokens: float, seconds: float) -> None:
        self.steps += 1
        weight = max(_MEMORY, 1 / self.steps)
        more, longer = tokens - self.tokens, seconds - self.seconds
        self.tokens += weight * more
        self.seconds += weight * longer
        self.variance = (1 - weight) * (self.variance + weight * more * more)
        self.covariance = (1 - weight) * (self.covariance + weight * more * longer)

    @property
    def per_token(self) -> float:
        """Seconds that one more token takes; 0 until steps of different sizes were measured."""
        return min(max(0.0, self.covariance / self.variance), self.seconds / self.tokens) if self.variance else 0.0

    def of(self, tokens: float) -> float:
        """Return the seconds of a step of so many tokens."""
        return self.seconds + self.per_token * (tokens - self.tokens)


@dataclass(slots=True)
class Controller:
    """Decides how many tokens to draft."""

    max_draft_tokens: int
    adaptive: bool = True
    """False: always as many as allowed."""
    candidates: int = 1
    """Guesses for each sequence: the target computes so many times the tokens of one draft."""
    step_time: StepTime = field(default_factory=StepTime)
    pass_time: StepTime = field(default_factory=StepTime)
    """The time of drafting one token for each of some sequences; most of it is the same for one and for many."""
    _overall: Acceptance = field(default_factory=Acceptance)
    _of_sequence: dict[Sequence, Acceptance] = field(default_factory=dict)
    _decisions: int = 0

    def lengths(self, limits: Mapping[Sequence, int], tokens: int, sequences: int) -> dict[Sequence, int]:
        """Return how many tokens to draft for each sequence; one that is left out gets none.

        Args:
            limits: the sequences that may have drafts, and the most that each can use.
            tokens: of the step without drafts.
            sequences: that get a token in the step without drafts.
        """
        limits = {sequence: min(limit, self.max_draft_tokens) for sequence, limit in limits.items() if limit > 0}
        if not (self.adaptive and limits):
            return limits
        self._decisions += 1
        chosen = self._best_lengths(limits, tokens, sequences)
        trial, step = divmod(self._decisions, _TRIAL)
        if step == _TRIAL // 8 or self._decisions == _TRIAL // 4:  # the very first trial may have been disturbed
            chosen = {} if chosen else dict.fromkeys(list(limits)[trial % _TRIED :: _TRIED] or limits, 1)
        for sequence in self._of_sequence.keys() & (limits.keys() - chosen.keys()):
            self._of_sequence[sequence].fade()
        return chosen

    def count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Learn how many of a sequence's drafts were accepted."""
        self._of_sequence.setdefault(sequence, Acceptance()).count(drafted, accepted)
        self._overall.count(drafted, accepted)

    def observe_drafting(self, lengths: Collection[int], seconds: float) -> None:
        """Learn how long it took to draft so many tokens for each of some sequences."""
        if lengths:
            passes = max(lengths)
            self.pass_time.observe(sum(lengths) / passes, seconds / passes)

    def forget(self, sequence: Sequence) -> None:
        """Drop what was learnt about a sequence."""
        self._of_sequence.pop(sequence, None)

    def _best_lengths(self, limits: Mapping[Sequence, int], tokens: int, sequences: int) -> dict[Sequence, int]:
        """Return the lengths with the most tokens per second, of all depths: sequences share drafting passes."""
        cost = self.candidates * self.step_time.per_token + self.pass_time.per_token
        seconds, per_pass = self.step_time.of(tokens), self.pass_time.of(0)
        if not self.step_time.steps or not self.pass_time.steps:
            return dict(limits)
        chances = {sequence: self._chance(sequence) for sequence in limits}
        best, chosen = sequences / seconds, dict[Sequence, int]()
        for depth in range(1, max(limits.values()) + 1):
            lengths = {one: min(depth, _length(chances[one], best * cost, limit)) for one, limit in limits.items()}
            gained = sum(_expected(chances[one], length) for one, length in lengths.items())
            longest = max(lengths.values())
            rate = (sequences + gained) / (seconds + cost * sum(lengths.values()) + per_pass * longest)
            if longest < depth:
                break
            if rate > best:
                best, chosen = rate, {one: length for one, length in lengths.items() if length}
        return chosen

    def _chance(self, sequence: Sequence) -> float:
        own, overall = self._of_sequence.get(sequence), min(1.0, self._overall.chance(0.7))
        return min(0.999, max(0.001, overall if own is None else own.chance(overall)))


def _length(chance: float, price: float, limit: int) -> int:
    """Return how many drafts are worth their price: the n-th is accepted with the n-th power of the chance."""
    if price <= 0:
        return limit
    return min(limit, max(0, math.floor(math.log(price) / math.log(chance)))) if price < 1 else 0


def _expected(chance: float, length: int) -> float:
    """Return how many of so many drafts are accepted on average."""
    return chance * (1 - chance**length) / (1 - chance)
