"""Turns of the sequences whose masks take long, so that these take no more than a share of the others' time.

A step waits for the masks of all its sequences. One with a guide that is dear, such as an ambiguous grammar, therefore
leaves steps out, in which those without a guide, or with a common one, go on.
"""

from __future__ import annotations

from collections.abc import Sequence as List

from inflight.engine.sequence import Sequence

CHEAP_S = 1e-4
"""CPU time of a mask that always has its turn: masks of JSON schemas take less."""
SHARE = 0.25
"""The time that dear masks may take, of what a step takes without masks."""
ALONE_S = 0.01
"""The time that masks may take in a step where all masks are dear: for so long a request waits that comes meanwhile."""
_LEARNT = 0.05
"""How much of a step that took longer than those before is learnt: most of it is that the machine was busy."""


class MaskTurns:
    """Decides which sequences a step leaves out because of their masks."""

    def __init__(self) -> None:
        self._step_s = 0.0
        """Seconds of a step without its masks."""
        self._credit_s = 0.0
        """Seconds that dear masks may take now; negative: what they have taken too much."""
        self._had_s: dict[Sequence, float] = {}
        """Time that each of the sequences with dear masks has had; who has had least is next."""
        self._fair_s = 0.0
        """Time that each would have had by equal shares of all that was given. Newcomers begin with that, so that who
        comes and goes overtakes nobody (virtual time of weighted fair queueing: Demers, Keshav and Shenker, 1989)."""
        self._taken: list[tuple[Sequence, float]] = []
        """The sequences of the next step that have guides, with what their masks have taken before it."""

    def left_out(self, decoding: List[Sequence]) -> set[Sequence]:
        """Return which of the sequences that would get a token the next step leaves out; never all of them."""
        costs = {one: one.guide.mask_s for one in decoding if one.guide is not None}
        waiting = self._waiting(costs, alone=len(costs) == len(decoding))
        self._taken = [(one, one.guide.total_s) for one in costs if one not in waiting and one.guide is not None]
        return waiting

    def is_dear(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes turns."""
        return sequence.guide is not None and sequence.guide.mask_s > CHEAP_S

    def may_leave(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes turns, and has had one since it was admitted."""
        return sequence.guide is not None and self.is_dear(sequence) and sequence.guide.had_turn

    def leaves(self, sequence: Sequence) -> None:
        """Note that a sequence leaves the batch to others."""
        assert sequence.guide is not None
        sequence.guide.had_turn = False

    def observe(self, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        masks_s = sum(one.guide.total_s - before for one, before in self._taken if one.guide is not None)
        own_s, self._taken = max(0.0, seconds - masks_s), []
        if self._step_s and own_s > self._step_s:
            own_s = self._step_s + _LEARNT * (own_s - self._step_s)
        self._step_s = own_s

    def _waiting(self, costs: dict[Sequence, float], *, alone: bool) -> set[Sequence]:
        """Return the sequences that wait, of those with guides; ``alone``: there are no others."""
        dear = {one: cost for one, cost in costs.items() if cost > CHEAP_S}
        self._had_s = {one: self._had_s.get(one, self._fair_s) for one in dear}
        alone = alone and len(dear) == len(costs)
        allowed_s = max(SHARE * self._step_s, ALONE_S if alone else 0.0)
        self._credit_s = min(self._credit_s + allowed_s, allowed_s)
        waiting, turns = set[Sequence](), sorted(dear, key=self._had_s.__getitem__)
        for place, one in enumerate(turns):
            is_next = self._credit_s > 0 and self._had_s[one] <= min(self._had_s.values())
            if not is_next and not (alone and place == 0):
                waiting.add(one)
                continue
            self._credit_s -= dear[one]
            self._had_s[one] += dear[one]
            self._fair_s += dear[one] / len(dear)
            if one.guide is not None:
                one.guide.had_turn = True
        return waiting
