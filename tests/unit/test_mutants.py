"""Recorded mutants fit the source, and the tests that noticed one are among those that are chosen for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runner.choice import choose
from tests.runner.imports import ROOT
from tests.runner.mutants import LONG, RESULTS, Mutant, applied, likeliest_first, mutant_of, others, read_mutants
from tests.runner.parts import TEST


def test_each_text_occurs_once() -> None:
    mutants = read_mutants()
    assert len(mutants) == 80
    for mutant in mutants:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant
        assert mutant.old != mutant.new


@pytest.mark.proof
def test_every_mutant_was_noticed_by_a_test_that_is_chosen_for_it() -> None:
    """Some of these tests run the mutant in a process of their own, which no import shows."""
    rows = json.loads(RESULTS.read_text())["rows"]
    assert [mutant_of(row) for row in rows] == read_mutants()
    for row in rows:
        choice = choose([row["file"]])
        assert row["noticed_by"].partition("::")[0] in choice.tests.keys() | choice.proofs.keys(), row


def test_a_checkout_is_put_back(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("a = 1\nb = 2\n")
    first, second = Mutant("a.py", "a = 1", "a = 3", ""), Mutant("a.py", "b = 2", "b = 4", "")
    with applied([first, second], tmp_path):
        assert file.read_text() == "a = 3\nb = 4\n"
    assert file.read_text() == "a = 1\nb = 2\n"
    with pytest.raises(KeyboardInterrupt), applied([first], tmp_path):
        raise KeyboardInterrupt
    assert file.read_text() == "a = 1\nb = 2\n"
    third = Mutant("a.py", "c = 1", "", "")
    with pytest.raises(ValueError, match="does not have 'c = 1' once"), applied([third], tmp_path):
        pass


def test_likeliest_first() -> None:
    graph = {"a.py": {"b.py", "test_far.py"}, "docs/": {"test_docs.py"}, "b.py": {"c.py"}, "c.py": {"test_far.py", "d"}}
    assert likeliest_first({"test_far.py", "d"}, "a.py", graph) == ["test_far.py", "d"]
    assert likeliest_first({"test_docs.py"}, "docs/a.md", graph) == ["test_docs.py"]
    near, seconds = {"a.py": {"test_b.py", "test_c.py"}}, {"test_b.py": 2.0, "test_c.py": 1.0}
    assert likeliest_first({"test_b.py", "test_c.py"}, "a.py", near, seconds) == ["test_c.py", "test_b.py"]
    assert likeliest_first({"test_a.py", "test_b.py"}, "a.py", near) == ["test_a.py", "test_b.py"]


@pytest.mark.proof
def test_a_file_runs_with_the_mutants_that_it_is_not_chosen_for() -> None:
    mutants = [one for one in read_mutants() if one.file in ("inflight/gateway/sse.py", "native/sample.cpp")]
    groups = {(test, marks): places for places, tests in others(mutants).items() for test, marks in tests}
    [sse, native] = range(2)
    assert groups["tests/engine/test_native_draw.py", TEST] == (sse,)
    assert groups["tests/engine/test_native_draw.py", LONG] == (sse,)
    assert groups["tests/gateway/test_bodies.py", TEST] == (), "its server draws tokens with the kernels"
    assert groups["tests/gateway/test_bodies.py", LONG] == (native,)
