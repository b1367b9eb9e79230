"""JSON of strangers: read as Python's own reader does, without holding other threads up, and counted."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import json_text
from inflight.json_text import loads, shown, size

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.parametrize(("most", "pieces"), [(0, (13, 14)), (0, (1 << 12, 1 << 18)), (50_000, (13, 14))])
@given(value=VALUES)
def test_it_reads_what_pythons_reader_reads(most: int, pieces: tuple[int, int], value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_MOST_AT_ONCE", most)
        patch.setattr(json_text, "_PIECES", pieces)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            assert loads(text) == value
            pairs: list[Any] = []
            assert loads(text, object_pairs_hook=pairs.append) == json.loads(text, object_pairs_hook=lambda _: None)


@pytest.mark.parametrize("first", range(13, 30))
@pytest.mark.parametrize(
    "unit",
    ["\\\\", "\\n", "\\u00e4", "\\ud83d\\ude00", "\\\\u12", "\\\\ud83d", "\\ud83d", "\\ude00x", '\\"', "\\\\\\ud83d"],
)
def test_an_escape_is_read_whole_wherever_a_piece_ends(monkeypatch: pytest.MonkeyPatch, unit: str, first: int) -> None:
    monkeypatch.setattr(json_text, "_MOST_AT_ONCE", -1)
    monkeypatch.setattr(json_text, "_PIECES", (first, 13))
    text = f'{{"{unit * 20}": "{unit * 20}", "a": 1}}'
    assert loads(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[1,", '{"a" 1}', "nul", "[1] 2", '"\\x"'),
        *(f'"{"a" * 40}', f'"{"a" * 40}\\', f'["{"a" * 40}\\u12"]', f'["{"a" * 40}\n"]', f'{{"{"a" * 40}\\'),
    ],
)
def test_it_refuses_what_pythons_reader_refuses(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(json_text, "_MOST_AT_ONCE", -1)
    monkeypatch.setattr(json_text, "_PIECES", (13, 14))
    with pytest.raises(ValueError, match=".") as expected:
        json.loads(text)
    with pytest.raises(ValueError, match=".") as refused:
        loads(text)
    assert str(refused.value) == str(expected.value)


@pytest.mark.parametrize(
    "text", ['["' + "a\\n" * 500_000 + '", 1]', '{"' + "\\u002c" * 250_000 + '":1}'], ids=["value", "key"]
)
def test_a_long_string_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """One call of Python's own reader would hold other threads up for as long as all of it takes."""
    lengths, scan = list[int](), json_text._SCAN

    def noted(piece: str, begin: int, strict: bool) -> tuple[str, int]:
        lengths.append(len(piece))
        return scan(piece, begin, strict)

    monkeypatch.setattr(json_text, "_SCAN", noted)
    assert loads(text) == json.loads(text)
    assert max(lengths) <= max(json_text._PIECES) + 1
    assert sum(lengths) >= len(text) - 20


@pytest.mark.parametrize("text", ["[" + "1," * 400_000 + "1]", "[" + "{}," * 100_000 + "{}]"])
def test_other_threads_run_while_many_values_are_read(text: str) -> None:
    """One call of Python's own reader lets none of them run."""
    turns, ends, interval = 0, threading.Event(), sys.getswitchinterval()

    def take_turns() -> None:
        nonlocal turns
        while not ends.wait(0):
            turns += 1

    other = threading.Thread(target=take_turns)
    sys.setswitchinterval(1e-4)
    try:
        other.start()
        before = turns
        loads(text)
        after = turns
    finally:
        ends.set()
        other.join()
        sys.setswitchinterval(interval)
    assert after - before > 1000


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
