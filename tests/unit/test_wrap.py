"""Wrapping of streamed text: no word is cut, nothing is lost, and the pieces that it comes in make no difference."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from wcwidth import wcswidth

from inflight.client.wrap import Wrapper

ALPHABET = [*"abc ,.!-\n\t世界。「“한é\u0301🙂🇩🇪", "👨‍👩‍👧"]
TEXTS = st.lists(st.sampled_from(ALPHABET)).map("".join)
WORDS = st.lists(st.text("abcdefgh.,", min_size=1, max_size=8), max_size=60)


def wrap(pieces: list[str], columns: int) -> str:
    wrapper = Wrapper(lambda: columns)
    return "".join(map(wrapper.feed, pieces)) + wrapper.end()


def inked(text: str) -> str:
    return re.sub(r"\s", "", text)


@example("aa。", 1, [])
@given(TEXTS, st.integers(1, 30), st.lists(st.integers(0, 40)))
def test_the_text_is_the_same_but_for_line_breaks(text: str, columns: int, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    wrapped = wrap(pieces, columns)
    assert inked(wrapped) == inked(text)
    assert wrapped.count("\n") >= text.count("\n")
    assert wrapped == wrap([text], columns) == wrap(list(text), columns)


@given(WORDS, st.integers(8, 40))
def test_words_that_fit_are_never_cut(words: list[str], columns: int) -> None:
    wrapped = wrap(list(" ".join(words)), columns)
    assert wrapped.split() == words
    assert all(len(line) <= columns for line in wrapped.split("\n"))
    # Greedy: a line is broken only where its next word would not fit.
    lines = wrapped.split("\n")
    for line, below in itertools.pairwise(lines):
        assert len(line) + 1 + len(below.split(" ")[0]) > columns


@given(st.text("世界你好、。「」", max_size=60), st.integers(6, 30))
def test_wide_characters_fill_lines_and_are_not_cut(text: str, columns: int) -> None:
    wrapped = wrap(list(text), columns)
    assert wrapped.replace("\n", "") == text
    fitting = [line for line in wrapped.split("\n") if not re.search("[、。「」]{2}", line)]
    assert all(wcswidth(line) <= columns for line in fitting)
    assert not re.search("[世界你好]\n[、。」]", wrapped)


def test_a_word_comes_as_soon_as_it_has_ended() -> None:
    wrapper = Wrapper(lambda: 20)
    assert [wrapper.feed(piece) for piece in ("Hel", "lo", " wor", "ld.\n", "Next")] == [
        "",
        "",
        "Hello",
        " world.\n",
        "",
    ]
    assert wrapper.end() == "Next"


@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_code_is_left_as_it_is(fence: str) -> None:
    code = f"{fence}python\nprint('a long line of code, which has many more columns')\n    indented = 1\n{fence}\n"
    assert wrap(list(f"See this:\n{code}and that is all of it"), 20) == f"See this:\n{code}and that is all of\nit"


def test_words_longer_than_a_line_stay_whole_on_a_line_of_their_own() -> None:
    url = "https://example.com/a/long/address"
    assert wrap(list(f"see {url} for more of it"), 20) == f"see\n{url} for\nmore of it"


def test_an_indentation_stays() -> None:
    assert wrap(["* one\n  * two and three\n\n\tfour"], 12) == "* one\n  * two and\nthree\n\n\tfour"


def test_the_terminal_may_change_its_width() -> None:
    columns = [10]
    wrapper = Wrapper(lambda: columns[0])
    first = wrapper.feed("one two three ")
    columns[0] = 20
    assert first + wrapper.feed("four five six seven") + wrapper.end() == "one two\nthree four five six\nseven"


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert wrap(["a\x1b[2Jb\x07\r\n\x9bc"], 40) == "a␛[2Jb␇\n\ufffdc"
