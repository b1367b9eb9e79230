"""`make bench ARGS=suite`: runs of the tests are counted by what pytest said, and none is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import suite
from benchmarks.__main__ import bench
from benchmarks.suite import COMMANDS, count_results, run_suite
from inflight.engine.native.bindings import INSTRUCTION_SETS
from inflight.errors import DeploymentError

SAID = """\
  1:02  1 of 2  tests/unit/test_a.py: 3 passed, 1 failed, 0 skipped in 4 s
.......F....                                                             [100%]
FAILED tests/unit/test_a.py::test_b[c d] - AssertionError: as pytest says it
Tried again: 2
  tests/unit/test_c.py::test_d: AssertionError: 3 passed, 0 failed, 0 skipped
FAILED tests/unit/test_a.py::test_b[c d]
FAILED tests/unit/test_c.py: it was ended by SIGSEGV in tests/unit/test_c.py::test_d
1317 passed, 2 failed, 19 skipped
make: *** [Makefile:46: check] Error 1
"""


def test_all_summaries_of_an_output_are_counted() -> None:
    assert count_results(SAID) == {"failed": 2, "passed": 1317, "skipped": 19, "repeated": 2}
    assert not count_results("12 files were left as they are\n").total()


def test_a_run_names_what_failed_and_its_arguments_are_not_those_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-- ARGS=suite")
    (tmp_path / "said").write_text(SAID)
    run = run_suite(["sh", "-c", f"cat {tmp_path}/said; env; exit 3"], False, tmp_path / "artifacts/log")
    assert (run.code, run.passed, run.failed, run.skipped, run.repeated) == (3, 1317, 2, 19, 2)
    assert run.instructions in {*INSTRUCTION_SETS, "none"}
    first, second = run.failures.split(", ")
    assert first == "tests/unit/test_a.py::test_b[c d]"
    assert second.startswith("tests/unit/test_c.py: it was ended by SIGSEGV")
    assert "MAKEFLAGS" not in (tmp_path / "artifacts/log").read_text()


def test_runs_are_added_to_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(COMMANDS, "test", ["echo", "2 passed, 0 failed, 0 skipped"])
    for _ in range(2):
        done = CliRunner().invoke(bench, ["suite", "--runs", "2", "--output", "results.json"])
        assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "results.json").read_text())
    assert [row["passed"] for row in record["rows"]] == [2] * 4


def test_a_run_beside_a_neighbour_begins_when_it_has_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    monkeypatch.setattr(suite, "NEIGHBOUR", ["sh", "-c", f"sleep 0.3; touch {taken}; echo taken; exec sleep 60", "sh"])
    run = run_suite(["sh", "-c", f"ls {taken}"], True, tmp_path / "log")
    assert (run.code, run.neighbour) == (0, "all cores for up to 1 s at a time")
    monkeypatch.setattr(suite, "NEIGHBOUR", ["sh", "-c", "echo it needs root >&2; exit 1", "sh"])
    with pytest.raises(DeploymentError, match="it needs root"):
        run_suite(["true"], True, tmp_path / "log")
    its_id = tmp_path / "process"
    ends = f"echo $$ >{its_id}; echo taken; echo it was killed >&2"
    monkeypatch.setattr(suite, "NEIGHBOUR", ["sh", "-c", ends, "sh"])
    until_it_has = f"until grep -q State:.Z /proc/$(cat {its_id})/status; do sleep 0.01; done"
    with pytest.raises(DeploymentError, match="the neighbour ended before the run: it was killed"):
        run_suite(["sh", "-c", until_it_has], True, tmp_path / "log")


def test_a_change_is_made_in_a_clone(tmp_path: Path) -> None:
    run = run_suite(["sh", "-c", "git diff --stat $BASE && pwd"], False, tmp_path / "log", changed="LICENSE")
    *differs, _, place = (tmp_path / "log").read_text().splitlines()
    assert (run.code, run.changed, [line.split()[0] for line in differs]) == (0, "LICENSE", ["LICENSE"])
    assert Path(place) != suite.ROOT
    assert not Path(place).exists()
    with pytest.raises(DeploymentError, match="--changed absent.py: the commit has no such file"):
        run_suite(["true"], False, tmp_path / "log", changed="absent.py")
