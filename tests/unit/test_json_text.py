"""JSON of strangers: counted, and shown by errors, without writing all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.json_text import shown, size

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=VALUES)
def test_size_is_no_more_than_the_text_has(value: Any) -> None:
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert size(value, 1 << 30) <= len(compact)


def test_size_is_not_counted_to_the_end() -> None:
    assert size(["a" * 10] * 5, 1 << 20) == 5 * 12 + 2 + 4
    assert size({"ab": 1, "c": [2]}, 1 << 20) == len('{"ab":1,"c":[2]}')
    assert 10 < size([[1] * 1000] * 1000, 10) < 10_000


@pytest.mark.parametrize("value", ["a" * 10_000_000, ["a"] * 1_000_000, {"a": {"b": "c" * 1000}}, [[]]])
def test_errors_show_no_more_than_the_beginning(value: Any) -> None:
    text = shown(value)
    assert len(text) <= 83
    assert json.dumps(value)[:80].startswith(text.removesuffix("..."))
    assert text.endswith("...") == (len(json.dumps(value)) > 80)
