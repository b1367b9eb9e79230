"""How the tests are shared out to processes (`tests/runner`), what these tell, and what a run says at its end."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runner import report as report_module
from tests.runner.choice import Choice, files_of_tests
from tests.runner.durations import Durations, share_out
from tests.runner.parts import Part, parts_of
from tests.runner.processes import Result, Runner
from tests.runner.report import Report
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
EVERY = dict.fromkeys(files_of_tests(), "")
TESTS = """
import os, time
import pytest

def test_passes(): time.sleep(0.01)
@pytest.mark.proof
def test_proof(): pass
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.fixture
def broken():
    yield
    raise OSError("it stays open")
def test_broken(broken): pass
@pytest.mark.parametrize("a", ["b c"])
def test_fails(a): assert a == "d", "no d"
"""


@given(
    st.dictionaries(st.integers(0, 99).map("tests/{}.py".format), st.floats(0, 100), max_size=20),
    st.floats(1, 300),
)
def test_each_file_is_in_one_list_and_no_list_is_long(seconds: dict[str, float], most_s: float) -> None:
    lists = share_out(seconds, most_s)
    assert sorted(path for paths in lists for path in paths) == sorted(seconds)
    assert all(lists)
    sums = [sum(seconds[path] for path in paths) for paths in lists]
    assert sums == sorted(sums, reverse=True)
    assert all(len(paths) == 1 or total <= most_s for paths, total in zip(lists, sums, strict=True))


@pytest.mark.parametrize("verb", ["test", "check", "release"])
def test_all_files_are_in_the_parts(verb: str) -> None:
    parts = parts_of(verb, Choice(EVERY, EVERY), Durations(), 2)  # type: ignore[arg-type]
    ordinary = [path for part in parts if part.marks.startswith("not ") for path in part.files]
    assert sorted(ordinary) == files_of_tests()
    assert [part.alone for part in parts] == sorted(part.alone for part in parts), "what runs alone is last"
    special = {part.marks for part in parts if not part.marks.startswith("not ")}
    spared = " and not release" if verb == "check" else ""
    marks = ("proof(waits=True)", "programs", "published", "alone")
    assert special == (set() if verb == "test" else {f"{mark}{spared}" for mark in marks})


def test_a_file_that_only_its_tests_are_chosen_of_runs_no_proofs() -> None:
    [file, other] = files_of_tests()[:2]
    parts = parts_of("check", Choice({file: "a", other: "b"}, {other: "b"}), Durations(), 2)
    assert {part.files: "not proof" in part.marks.split(" and ")[0] for part in parts} == {
        (file,): True,
        (other,): False,
    }


def _run(folder: Path, *texts: str, marks: str = "not proof", imported: Sequence[str] = ()) -> list[Result]:
    """Run files with these texts in one process each, with no configuration of this project."""
    files = [folder / f"test_{number}.py" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    proof: a\n")
    options = ["-q", "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", "-p", "no:asyncio"]
    ended: list[Result] = []
    runner = Runner(2, folder, ended.append, options, imported=imported)
    results = runner.run([Part((str(file),), marks, 1.0) for file in files])
    assert ended == results
    return results


@pytest.mark.proof
def test_the_first_part_does_not_wait_for_what_the_others_have_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = tmp_path / "began"
    (tmp_path / "takes_long.py").write_text(
        f"""
import os, time
for _ in range(6000):
    if os.path.exists({str(began)!r}):
        break
    time.sleep(0.01)
else:
    raise ImportError("the first part has not begun")
"""
    )
    first = f"def test_first(): open({str(began)!r}, 'w').close()"
    other = "import sys\ndef test_other(): assert 'takes_long' in sys.modules"
    results = _run(tmp_path, first, other, imported=["takes_long"])
    assert not [result.output for result in results if result.failed]


def test_each_test_is_told_of_once(tmp_path: Path) -> None:
    [result] = _run(tmp_path, TESTS)
    outcomes = {one.test.partition("::")[2]: one.outcome for one in result.ended}
    assert outcomes == {
        "test_passes": "passed",
        "test_skipped": "skipped",
        "test_expected": "skipped",
        "test_broken": "failed",
        "test_fails[b c]": "failed",
    }
    assert result.failed
    assert not result.broke
    assert "no d" in result.output
    assert next(one for one in result.ended if "passes" in one.test).seconds >= 0.01


BROKEN = {
    "import os, signal\ndef test_a(): os.kill(os.getpid(), signal.SIGSEGV)": "SIGSEGV in .*::test_a$",
    "import os\ndef test_a(): os._exit(0)": "pytest ended with code 0 in .*::test_a$",
    "import os\nos._exit(9)": "pytest ended with code 9 outside of a test",
    "def test_a(: pass": "pytest ended with code 2",
    "import pytest\ndef test_a(): pytest.exit('enough')": "pytest ended with code 2 in .*::test_a",
}
"""What ends a process, and what is said of it."""


@pytest.mark.proof
def test_a_process_that_ends_before_its_tests_has_failed(tmp_path: Path) -> None:
    *broken, whole = sorted(_run(tmp_path, *BROKEN, "def test_b(): pass"), key=lambda one: one.part.files)
    assert (whole.failed, dict(whole.counts)) == (False, {"passed": 1})
    for result, words in zip(broken, BROKEN.values(), strict=True):
        assert result.failed
        assert re.search(words, result.broke)


@pytest.mark.proof
def test_what_has_no_test_with_the_marks_is_no_failure(tmp_path: Path) -> None:
    [result] = _run(tmp_path, "def test_a(): pass", marks="proof")
    assert not result.failed
    assert not result.ended


@pytest.mark.proof
def test_the_end_says_what_failed_what_was_repeated_and_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = _run(tmp_path, TESTS, "import os\nos._exit(9)")
    results[0].repeated.append(("tests/a.py::test_b", "OSError: busy"))
    report = Report([one.part for one in results], Durations())
    for result in results:
        report.part(result)
    assert report.end(tmp_path / "durations.json") == 1
    *_, failures, last = capsys.readouterr().out.rpartition("Tried again: 1\n")[2].splitlines()
    assert failures
    assert last == "1 passed, 3 failed, 2 skipped"
    assert json.loads((tmp_path / "durations.json").read_text())["files"]


def test_a_part_that_tells_nothing_is_a_failure_and_no_part_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = Part(("tests/a.py",), "", 1.0)
    assert Report([part], Durations()).end(tmp_path / "durations.json") == 1
    assert "FAILED 1 of 1 processes told nothing" in capsys.readouterr().out
    assert Report([], Durations()).end(tmp_path / "durations.json") == 0


@pytest.mark.proof
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("text", "commit", "since", "written"),
    [
        ("pass", "abc", "", True),
        ("pass", "abc", "docs/results/tests/durations.json", True),
        ("pass", "abc", "docs/page.md", False),
        ("pass", "abc-dirty", "", False),
        ("assert 0", "abc", "", False),
    ],
)
def test_that_everything_passed_is_written_of_a_commit(
    text: str, commit: str, since: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "provenance", lambda: {"commit": commit, "machine": "m", "date": "d"})
    monkeypatch.setattr(report_module, "changed_files", lambda _commit: {since} - {""})
    results, passed = _run(tmp_path, f"def test_a(): {text}"), tmp_path / "passed.json"
    report = Report([one.part for one in results], Durations())
    report.part(results[0])
    report.end(tmp_path / "durations.json", passed)
    assert passed.is_file() == written
    if written:
        found = json.loads(passed.read_text())
        assert (found["commit"], found["passed"]) == ("abc", 1)


@pytest.mark.proof
def test_a_test_that_is_tried_again_ends_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import pytest\ntries = []\n@pytest.fixture\ndef late():\n    yield\n    tries.append(1)\n"
    text += "    assert len(tries) > 1, 'late'\n@pytest.mark.flaky(reruns=2)\ndef test_a(late): pass\n"
    [result] = _run(tmp_path, text)
    assert [(one.test.partition("::")[2], one.outcome) for one in result.ended] == [("test_a", "passed")]
    Report([result.part], Durations()).part(result)
    assert "1 rerun" in capsys.readouterr().out, "what is printed of it may not be seen again soon"
    assert ["late" in cause for _, cause in result.repeated] == [True]


def test_durations_take_the_place_of_older_ones() -> None:
    old = Durations(
        {"tests/a.py": {"test": 9.0, "proof": 5.0}, "tests/b.py": {"test": 1.0}}, {"tests/a.py::test_b": 9.0}
    )
    new = old.updated([("tests/a.py::test_b", "test", 0.5), ("tests/a.py::test_c[::]", "test", 6.0)])
    assert new.files == {"tests/a.py": {"test": 6.5, "proof": 5.0}, "tests/b.py": {"test": 1.0}}
    assert new.slow == {"tests/a.py::test_c[::]": 6.0}
    assert new.seconds("tests/a.py", ("test", "proof")) == 11.5
    assert new.seconds("tests/unheard.py", ("test",)) > 0
    assert new.updated([("tests/a.py::test_d", "test", 0.1)]).slow == new.slow, "a proof of the file did not run"
    assert new.updated([("tests/a.py::test_d", "proof", 0.1)]).slow == {}
    assert new.updated([("tests/b.py::test_d", "proof", 2.0)]).files["tests/b.py"] == {"proof": 2.0}, "no test is left"


@pytest.mark.proof
def test_progress_names_the_test_that_runs_longest(tmp_path: Path) -> None:
    text = "import pathlib, time\ndef test_a(): pass\n"
    text += "def test_b():\n    while not pathlib.Path(__file__).with_name('seen').exists(): time.sleep(0.05)\n"
    (tmp_path / "test_long.py").write_text(text)
    told: list[int] = []

    def progress(ended: int, _seconds: float, test: str) -> None:
        told.append(ended)
        if (ended, test.partition("::")[2]) == (1, "test_b"):
            (tmp_path / "seen").touch()

    runner = Runner(1, tmp_path, print, ["-c", "/dev/null"], progress, every_s=0.05)
    [result] = runner.run([Part((str(tmp_path / "test_long.py"),), "", 1.0)])
    assert not result.failed
    assert told[-1] == 2


RUNS_ONE = """
import sys
from pathlib import Path
from tests.runner.parts import Part
from tests.runner.processes import Runner
file = Path(sys.argv[1])
Runner(1, file.parent, print, ["-c", "/dev/null"]).run([Part((str(file),), "", 1.0)])
"""
LASTS = """
import os, pathlib, pytest, time
HERE = pathlib.Path(__file__).parent
@pytest.fixture
def served():
    yield
    (HERE / "ends").touch()
    while not (HERE / "interrupted").exists():
        time.sleep(0.01)
    (HERE / "ended").touch()
def test_a(served):
    (HERE / "began").write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.proof
def test_ctrl_c_ends_all_processes_and_their_fixtures(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches each process, and then comes once more, from the runner."""
    file, began = tmp_path / "test_long.py", tmp_path / "began"
    file.write_text(LASTS)
    command = [sys.executable, "-c", RUNS_ONE, file]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        assert wait_until(lambda: began.exists() and began.read_text(), within_s=120)
        os.killpg(process.pid, signal.SIGINT)
        assert wait_until(lambda: (tmp_path / "ends").exists(), within_s=120)
        os.kill(int(began.read_text()), signal.SIGINT)
        (tmp_path / "interrupted").touch()
        assert process.wait(120) != 0
    assert not psutil.pid_exists(int(began.read_text()))
    assert (tmp_path / "ended").exists()


GOES_ON = """
import threading, time
def lasts(): time.sleep(600)
def test_a(): threading.Thread(target=lasts).start()
"""


@pytest.mark.proof
def test_a_thread_that_goes_on_is_shown_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(GOES_ON)
    program = "from tests.runner import processes; processes.STOP_S = 0.1; "
    program += f"processes.run_pytest(['-c', '/dev/null', {str(tmp_path)!r}], {{}}, {str(tmp_path / 'said')!r})"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 1
    assert "1 passed" in (said := (tmp_path / "said").read_text())
    assert "in lasts" in said


def test_a_mark_by_which_a_part_is_made_is_spelled_as_it_is_looked_for() -> None:
    """Another spelling would leave the test out of every run."""
    may_have_it = {ROOT / path for path in files_of_tests()} | set((ROOT / "tests/gpu").rglob("*.py"))
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Attribute(ast.Attribute(attr="mark"), "alone" | "programs" | "published" as name):
                    looked_for = f"mark.{name}"
                case ast.Call(ast.Attribute(ast.Attribute(attr="mark"), "proof"), keywords=[_, *_]):
                    looked_for = "mark.proof(waits=True)"
                case ast.Call(
                    ast.Attribute(attr="add_marker"), [ast.Constant("alone" | "programs" | "published" as name)]
                ):
                    looked_for = f"mark.{name}"
                case _:
                    continue
            assert looked_for in text, path
            assert path in may_have_it
