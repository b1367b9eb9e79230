"""Few cases have every pair of values (`tests/support/pairs.py`)."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairs import pairwise

AXES = ("abcde", [1, 2, 3], [True, False], range(4))


def _odd(letter: str, number: int, *_: object) -> bool:
    return letter != "a" or number == 2


def _pairs(cases: list[tuple[object, ...]]) -> set[object]:
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_that_is_allowed_is_in_few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "dev")
    whole = [case for case in itertools.product(*AXES) if _odd(*case)]
    chosen = pairwise(*AXES, allowed=_odd)
    assert set(chosen) < set(whole)
    assert chosen == [case for case in whole if case in chosen], "the order is that of the product"
    assert _pairs(chosen) == _pairs(whole)
    assert len(chosen) < len(whole) / 3
    assert chosen == pairwise(*AXES, allowed=_odd)
    monkeypatch.setenv("HYPOTHESIS_PROFILE", "soak")
    assert pairwise(*AXES, allowed=_odd) == whole


def test_an_axis_without_values_has_no_cases() -> None:
    assert pairwise("ab", []) == []
