"""Few cases of many axes: any two values of different axes meet in one of them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Return some of the product of the axes, in its order, with every pair of values that an allowed case has.

    They are the same each time. Where HYPOTHESIS_PROFILE is ``soak``, all of the product is returned.

    Args:
        axes: the values of each axis. Values that must meet all those of a third axis belong into one axis as tuples.
        allowed: takes one value of each axis, and returns whether they may come together.
    """
    cases = [case for case in itertools.product(*map(range, map(len, axes))) if allowed(*_values(axes, case))]
    chosen = cases if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else sorted(_cover(cases, len(axes)))
    return [_values(axes, case) for case in chosen]


def _values(axes: Sequence[Sequence[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[place] for axis, place in zip(axes, case, strict=True))


def _cover(cases: list[tuple[int, ...]], axes: int) -> list[tuple[int, ...]]:
    """Return cases that have every pair; those that add the most pairs are taken first.

    They are looked at in a random order, or those that add one pair would all have the first values of other axes.
    """
    cases = random.Random(0).sample(cases, len(cases))
    chosen, seen = list[tuple[int, ...]](), set[tuple[tuple[int, int], ...]]()
    for fewest in range(axes * (axes - 1) // 2, 0, -1):
        for case in cases:
            new = set(itertools.combinations(enumerate(case), 2)) - seen
            if len(new) >= fewest:
                chosen.append(case)
                seen |= new
    return chosen
