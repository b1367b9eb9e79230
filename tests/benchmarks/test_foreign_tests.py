"""The tests of other servers: how their outcomes are told, and sorted by the committed list of reasons."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.foreign import suites
from benchmarks.foreign.reasons import Kind, Outcome, Reason, read_reasons, sort, unused

PLUGINS = Path(suites.__file__).with_name("plugins")
FILE = """
import pytest

import nowhere
from nowhere.parts import Part, PartError
from tests_of_nowhere.utils import Server

LIMIT = Part.LIMIT

class Mine(Part):
    @nowhere.traced
    def one(self):
        return 1

def test_of_the_api():
    assert Server().answer == 200 and Mine().one() == 1

def test_of_its_own_parts():
    assert Part(limit=3).size == 3

def test_of_its_own_sums():
    assert LIMIT + 1

def test_that_fails():
    assert Server().answer == 404

@pytest.fixture
def broken():
    raise PartError("no such part")

def test_whose_fixture_fails(broken):
    pass
"""
STAND_IN = """
import absent

class Server:
    answer = 200

absent.stand_in(("nowhere",), {"tests_of_nowhere.utils": {"Server": Server}, "tests_of_nowhere": {}})

def pytest_collection_finish():
    absent.tests_begin()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """A suite of our own, run as those of others are: its outcomes by the test's name."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_parts.py").write_text(FILE)
    (folder / "test_broken.py").write_text("import nothing_of_this_name\n")
    (folder / "stand_in.py").write_text(STAND_IN)
    environment = os.environ | {"PYTHONPATH": f"{PLUGINS}:{folder}", "TELL_TO": str(folder / "told")}
    words = ["-p", "tell", "-p", "stand_in", "-p", "no:cacheprovider", "--tb=line", "--continue-on-collection-errors"]
    subprocess.run([sys.executable, "-m", "pytest", *words], cwd=folder, env=environment, capture_output=True)
    outcomes = [Outcome(**json.loads(line)) for line in (folder / "told").read_text().splitlines()]
    return {one.test.partition("::")[2] or one.test: one for one in outcomes}


@pytest.mark.parametrize(
    ("test", "outcome", "says"),
    [
        ("test_of_the_api", "passed", ""),
        ("test_of_its_own_parts", "skipped", "nowhere.parts.Part"),
        ("test_of_its_own_sums", "skipped", "nowhere.parts.Part.LIMIT"),
        ("test_that_fails", "failed", "assert 200 == 404"),
        ("test_whose_fixture_fails", "failed", "no such part"),
        ("test_broken.py", "failed", "nothing_of_this_name"),
    ],
)
def test_an_outcome_is_told_with_its_cause(told: dict[str, Outcome], test: str, outcome: str, says: str) -> None:
    assert told[test].outcome == outcome
    assert says in told[test].says


def test_each_test_is_told_once(told: dict[str, Outcome]) -> None:
    assert len(told) == 6


def reason(kind: Kind, why: str, says: str = "", suite: str = "a", *tests: str, case: str = "") -> Reason:
    return Reason(suite, kind, why, re.compile(says), tests, re.compile(case))


LIST = [
    reason(Kind.PATH, "no such path", "404"),
    reason(Kind.SCOPE, "no images", "400", "a", "t.py::test_image", case="^big$"),
    reason(Kind.MODEL, "of another suite", suite="b"),
]


@pytest.mark.parametrize(
    ("test", "says", "why"),
    [
        ("t.py::test_image[big]", "assert 404 == 200", "no such path"),
        ("t.py::test_image[big]", "assert 400 == 200", "no images"),
        ("in/a/folder/t.py::test_image[big]", "assert 400 == 200", "no images"),
    ],
)
def test_a_failure_has_the_first_reason_that_fits(test: str, says: str, why: str) -> None:
    [found] = sort("a", [Outcome(test, "failed", says)], LIST)
    assert found.why == why


@pytest.mark.parametrize(
    ("test", "says"),
    [
        ("t.py::test_image[big]", "assert 500 == 200"),
        ("t.py::test_image[bigger]", "assert 400 == 200"),
        ("t.py::test_image", "assert 400 == 200"),
        ("t.py::test_image_of_text[big]", "assert 400 == 200"),
        ("not_t.py::test_image[big]", "assert 400 == 200"),
    ],
)
def test_a_new_failure_has_no_reason_and_is_shown_by_its_name(test: str, says: str) -> None:
    [found] = sort("a", [Outcome(test, "failed", says)], LIST)
    assert found.kind is Kind.UNSORTED
    assert test in found.why
    assert says in found.why


def test_what_passes_and_what_is_skipped_needs_no_reason() -> None:
    assert sort("a", [Outcome("t", "passed", "404"), Outcome("t", "skipped", "404")], LIST) == []


def test_a_reason_that_no_failure_has_is_found() -> None:
    failures = sort("a", [Outcome("t", "failed", "404")], LIST)
    assert [one.why for one in unused("a", failures, LIST)] == ["no images"]


def test_each_reason_of_the_list_is_of_a_suite_and_says_where_it_fits() -> None:
    for one in read_reasons():
        assert one.suite in suites.SUITES
        assert one.kind is not Kind.UNSORTED
        assert not one.says.search(""), f"{one.why}: it would fit any failure of its tests"
        assert one.tests or len(one.says.pattern) > 20, f"{one.why}: it would fit many failures"


def test_no_reason_stands_twice_for_a_suite_with_another_kind() -> None:
    kinds = Counter(why for _, why in {(one.kind, (one.suite, one.why)) for one in read_reasons()})
    assert max(kinds.values()) == 1


@pytest.mark.parametrize(("says", "code"), [("404", 0), ("a new one", 1)])
def test_the_command_ends_with_a_failure_without_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, code: int
) -> None:
    (tmp_path / "vllm.jsonl").write_text(json.dumps({"test": "t.py::test_new", "outcome": "failed", "says": says}))
    monkeypatch.setattr("benchmarks.foreign.command._KEPT", tmp_path)
    monkeypatch.setattr("benchmarks.foreign.command.read_reasons", lambda: [replace(LIST[0], suite="vllm")])

    result = CliRunner().invoke(bench, ["foreign", "vllm", "--kept"])

    assert result.exit_code == code
    assert ("t.py::test_new: a new one" in result.output) == bool(code)
