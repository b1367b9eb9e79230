"""A table of rows is one test, and its failure names every row that fails (`tests/support/tables.py`)."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.support.tables import each_row


def test_each_row_lists_every_row_that_fails() -> None:
    checked = []

    @each_row(("number", "square"), [(1, 1), (2, 5), (3, 9), (4, 17)])
    def check(tmp_path: Path, number: int, square: int) -> None:
        checked.append(number)
        assert number * number == square

    assert list(inspect.signature(check).parameters) == ["tmp_path"]
    with pytest.raises(pytest.fail.Exception) as caught:
        check(tmp_path=Path())
    assert checked == [1, 2, 3, 4]
    said = str(caught.value)
    assert "2 of 4 rows" in said
    assert "number=2, square=5\n    AssertionError" in said
    assert "number=4, square=17\n    AssertionError" in said
    assert "number=3" not in said


def test_each_row_without_a_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="check has no rows"):

        @each_row("number", [])
        def check(number: int) -> None:
            raise AssertionError(number)
