"""`make bench ARGS=suite`: runs of the tests are counted by what pytest said, and none is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import suite
from benchmarks.__main__ import bench
from benchmarks.suite import COMMANDS, count_results, run_suite
from inflight.errors import DeploymentError

SAID = """\
.......F....                                                             [100%]
FAILED tests/unit/test_a.py::test_b[c d]@test_a - AssertionError: 3 passed in 4s
ERROR tests/unit/test_c.py
ERROR    inflight.engine.loop:loop.py:191 the engine failed
1 failed, 1317 passed, 19 skipped, 2 warnings, 1 error, 2 rerun in 470.38s (0:07:50)
.... [100%]
17 passed, 3000 deselected in 61.20s (0:01:01)
make: *** [Makefile:46: proofs] Error 1
"""


def test_all_summaries_of_an_output_are_counted() -> None:
    assert count_results(SAID) == {"failed": 1, "passed": 1334, "skipped": 19, "error": 1, "rerun": 2}
    assert not count_results("12 files were left as they are\nno tests ran in 0.01s\n")


def test_a_run_names_what_failed_and_its_arguments_are_not_those_of_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "-- ARGS=suite")
    (tmp_path / "said").write_text(SAID)
    run = run_suite(["sh", "-c", f"cat {tmp_path}/said; env; exit 3"], False, tmp_path / "artifacts/log")
    assert (run.code, run.passed, run.failed, run.skipped, run.repeated) == (3, 1334, 2, 19, 2)
    assert run.failures == "tests/unit/test_a.py::test_b[c d]@test_a, tests/unit/test_c.py"
    assert "MAKEFLAGS" not in (tmp_path / "artifacts/log").read_text()


def test_runs_are_added_to_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(COMMANDS, "test", ["echo", "2 passed in 0.10s"])
    for _ in range(2):
        done = CliRunner().invoke(bench, ["suite", "--runs", "2", "--output", "results.json"])
        assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "results.json").read_text())
    assert [row["passed"] for row in record["rows"]] == [2] * 4


def test_a_run_beside_a_neighbour_begins_when_it_has_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = tmp_path / "taken"
    monkeypatch.setattr(suite, "NEIGHBOUR", ["sh", "-c", f"sleep 0.3; touch {taken}; echo taken; exec sleep 60", "sh"])
    run = run_suite(["sh", "-c", f"ls {taken}"], True, tmp_path / "log")
    assert (run.code, run.neighbour) == (0, "a core for 1 s in 2")
    monkeypatch.setattr(suite, "NEIGHBOUR", ["sh", "-c", "echo it needs root >&2; exit 1", "sh"])
    with pytest.raises(DeploymentError, match="it needs root"):
        run_suite(["true"], True, tmp_path / "log")
