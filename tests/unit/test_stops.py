"""Stop strings are found as searching for each of them finds them, at a cost that the text sets."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.text.stops import StopMatcher
from tests.support.properties import examples

_LETTERS = st.text("ab😀", min_size=1, max_size=7)
_PARTS = st.lists(st.tuples(st.text("ab😀", max_size=5), st.booleans()), max_size=12)


def _first_match(text: str, stops: list[str]) -> int | None:
    """Return where the match begins that ends first, and of those that end together the longest."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def _open(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix that begins one of the strings."""
    sizes = range(len(text), 0, -1)
    return next((size for size in sizes if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@settings(max_examples=examples(3))
@given(stops=st.lists(_LETTERS, min_size=1, max_size=6), parts=_PARTS)
@example(stops=["aab", "aaaa"], parts=[("aaa", False), ("b", False)])
@example(stops=["ab", "b", "aabb"], parts=[("aab", False)])
@example(stops=["ab"], parts=[("a", False), ("b", True), ("ab", False)])
def test_what_is_found_and_what_is_held_back(stops: list[str], parts: list[tuple[str, bool]]) -> None:
    """Against a search of the whole text; a part that is skipped ends all that was open, and hides what it has."""
    matcher, seen, skipped = StopMatcher(stops), "", 0
    for part, skip in parts:
        if skip:
            matcher.skip(part)
            skipped += len(seen) + len(part)
            seen = ""
            assert matcher.settled == skipped
            continue
        seen += part
        expected = _first_match(seen, stops)
        assert matcher.push(part) is (expected is not None)
        if expected is not None:
            assert matcher.match_start == matcher.settled == skipped + expected
            return
        assert (matcher.length, matcher.settled) == (skipped + len(seen), skipped + len(seen) - _open(seen, stops))


def _seconds(stops: list[str], text: str) -> float:
    """Return the least of several times that matching takes."""
    times = []
    for _ in range(5):
        matcher = StopMatcher(stops)
        began = time.perf_counter()
        for start in range(0, len(text), 4):
            assert not matcher.push(text[start : start + 4])
            assert matcher.settled <= matcher.length
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.parametrize("length", [32, 5000])
def test_many_long_strings_cost_what_one_does(length: int) -> None:
    """Searching for each of them costs 50 times as much, and more where they are longer."""
    text = "the quick brown fox jumps over the lazy dog " * 50
    many = [f"the q{number}" + "x" * length for number in range(256)]
    assert _seconds(many, text) < 15 * _seconds(["the qx"], text)
