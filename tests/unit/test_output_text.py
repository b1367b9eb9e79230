"""JSON is followed character by character, and markers stand at their place in the text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.output.incremental_json import MAX_DEPTH, JsonText
from inflight.text.output.markers import MarkedDetokenizer, Marker, Piece
from tests.support.chat_formats import whole
from tests.support.tokenizers import FAMILIES as VOCABULARIES
from tests.support.tokenizers import make_tokenizer

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(_JSON, st.sampled_from([None, 1]), st.booleans())
def test_json_is_accepted_whole(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    reader = JsonText()
    accepted, end = reader.feed(f"{text} ", 0)
    assert reader.done
    assert not reader.broken
    assert accepted == text
    assert end == len(text)


@given(st.text('{}[]",:0.1e-+ tru\\un\n\t', max_size=12))
def test_json_is_judged_as_pythons_parser_does(text: str) -> None:
    reader = JsonText()
    accepted, end = reader.feed(f"{text} ", 0)
    try:
        json.loads(text, strict=False, parse_constant=int)
    except ValueError:
        assert not (reader.done and end >= len(text.rstrip()))
    else:
        assert reader.done
        assert json.loads(accepted) == json.loads(text, strict=False)


def test_deep_json_is_no_call() -> None:
    reader = JsonText()
    accepted, _ = reader.feed("[" * (MAX_DEPTH + 1), 0)
    assert reader.broken
    assert accepted == "[" * MAX_DEPTH


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@given(data=st.data())
def test_markers_leave_the_text_as_it_is(vocabulary: str, data: st.DataObject) -> None:
    tokenizer = make_tokenizer(vocabulary)
    drawn = st.integers(0, tokenizer.config.vocab_size - 1) | st.sampled_from([0, 1])
    tokens = data.draw(st.lists(drawn, max_size=20))
    marked, plain = MarkedDetokenizer(tokenizer, frozenset({0, 1})), IncrementalDetokenizer(tokenizer)
    pieces: list[Piece] = []
    for token in tokens:
        pieces += marked.push([token])
    pieces += marked.finish()
    expected = plain.push(tokens) + plain.finish()
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == expected
    markers = [piece.token for piece in pieces if isinstance(piece, Marker)]
    assert markers == [token for token in tokens if token in (0, 1)]
    at_once = MarkedDetokenizer(tokenizer, frozenset({0, 1}))
    assert whole(at_once.push(tokens) + at_once.finish()) == whole(pieces)


def test_markers_stand_at_their_place_and_wait_for_the_limit() -> None:
    tokenizer = make_tokenizer("byte level")
    first, second = tokenizer.encode_batch(["The fox", " jumps"])
    marked = MarkedDetokenizer(tokenizer, frozenset({1}))
    assert marked.push([*first, 1, *second], text_limit=4) == ["The "]
    assert marked.push([], text_limit=7) == ["fox", Marker(1, "<s>")]
    assert marked.finish(text_limit=9) == [" j"]
