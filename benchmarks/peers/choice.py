"""Which variants are best, and by how much ours are ahead: numbers in, numbers out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.peers.variants import OURS, Variant

One = TypeVar("One")

Figures = Mapping[str, float]
Measured = Mapping[str, Figures]
"""The figures of one round, by the variant's key."""


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs in one figure: our slowest round over their fastest."""

    ours: Variant
    theirs: Variant
    slowest: float
    fastest: float

    @property
    def value(self) -> float:
        """The ratio."""
        return self.slowest / self.fastest


def in_turn(measured: Sequence[One], number: int) -> list[One]:
    """Return what is measured in the order of a round: each round begins with another."""
    first = number % len(measured) if measured else 0
    return [*measured[first:], *measured[:first]]


def best(variants: Iterable[Variant], rounds: Sequence[Measured], figure: str) -> Variant | None:
    """Return the variant with the highest median of a figure; None: none has it."""
    medians = {
        variant: statistics.median(found)
        for variant in variants
        if (found := [measured[variant.key][figure] for measured in rounds if figure in measured.get(variant.key, {})])
    }
    return max(medians, key=lambda variant: medians[variant]) if medians else None


def chosen(variants: Sequence[Variant], grid: Measured, figures: Iterable[str]) -> list[Variant]:
    """Return the variants that are their contender's best of their class in some figure, in the grid's order."""
    groups: dict[tuple[str, str], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.contender, variant.kind), []).append(variant)
    kept = {best(group, [grid], figure) for figure in figures for group in groups.values()}
    return [variant for variant in variants if variant in kept]


def ratio(variants: Sequence[Variant], rounds: Sequence[Measured], figure: str) -> Ratio | None:
    """Return our slowest over their fastest among variants of one class; None: one side has none.

    Ours is the variant with the best median. Theirs is whichever peer's variant had the fastest single round.
    """
    ours = best([variant for variant in variants if variant.contender == OURS], rounds, figure)
    theirs = {
        variant: max(found)
        for variant in variants
        if variant.contender != OURS
        and (found := [measured[variant.key][figure] for measured in rounds if figure in measured.get(variant.key, {})])
    }
    if ours is None or not theirs:
        return None
    fastest = max(theirs, key=lambda variant: theirs[variant])
    slowest = min(measured[ours.key][figure] for measured in rounds if ours.key in measured)
    return Ratio(ours, fastest, slowest, theirs[fastest])
