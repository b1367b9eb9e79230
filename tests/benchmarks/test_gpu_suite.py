"""How tests/gpu is run: a CUDA error costs the test that made it and no other; on a CPU the bodies are exercised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.contact.plan import CALLS
from benchmarks.contact.record import Recorder, lines
from benchmarks.contact.stage import Contact
from benchmarks.contact.suite import record, suite

ROOT = Path(__file__).parents[2]
_TESTS = '''
import pytest

broken = False

@pytest.mark.parametrize("number", range(8))
def test_of_a_device(number):
    """After a fault whatever the process launches fails too."""
    global broken
    broken = broken or number == 2
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_of_something_else():
    assert False, "no fault of the device"
'''


def _pytest(folder: Path, *arguments: str) -> dict[str, list[str]]:
    (folder / "test_device.py").write_text(_TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.gpu.support.sticky",
        "--junitxml=report.xml",
        *arguments,
    ]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment = plain | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    found: dict[str, list[str]] = {"passed": [], "failed": []}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        ended = "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"
        found[ended].append(str(case.get("name")))
    return found


@pytest.mark.proof
def test_a_fault_costs_one_test(tmp_path: Path) -> None:
    found = _pytest(tmp_path, "-p", "xdist", "-n", "1", "--dist", "load")
    assert sorted(found["passed"]) == [f"test_of_a_device[{number}]" for number in (0, 1, 3, 4, 5, 6, 7)]
    assert set(found["failed"]) == {"test_of_a_device[2]", "test_of_something_else"}


def test_without_workers_a_fault_ends_the_run(tmp_path: Path) -> None:
    found = _pytest(tmp_path)
    assert found == {"passed": [f"test_of_a_device[{number}]" for number in (0, 1)], "failed": ["test_of_a_device[2]"]}


def test_the_report_of_the_tests_becomes_results(tmp_path: Path) -> None:
    _pytest(tmp_path)
    contact = Contact(Recorder(tmp_path / "contact.jsonl", "A", "tests"), True, True, tmp_path)
    record(contact, tmp_path / "report.xml")
    wrong, passed = lines(tmp_path / "contact.jsonl")
    assert (wrong["result"], wrong["good"]) == ("test_of_a_device[2]", False)
    assert "illegal memory access" in wrong["note"]
    assert (passed["result"], passed["value"]) == ("tests passed", 2)


def test_no_report_of_an_earlier_call_is_taken_for_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.xml").write_text('<testsuite><testcase name="test_of_yesterday"/></testsuite>')
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 4))
    suite(Contact(Recorder(tmp_path / "contact.jsonl", "A", "tests"), True, True, tmp_path), "")
    [line] = lines(tmp_path / "contact.jsonl")
    assert (line["result"], line["value"], line["good"]) == ("pytest's exit status", 4, False)


@pytest.mark.proof
def test_the_bodies_on_a_cpu(tmp_path: Path) -> None:
    """The tests of whole engines, by the interpreter, and of the kernels that engines need first."""
    report = tmp_path / "report.xml"
    [check] = [stage for stage in CALLS["B"] if stage.judges]
    kernels = [f"tests/gpu/test_at_size.py::test_kernels[{case}]" for case in check.cases]
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_engines.py", *kernels, "-q", f"--junitxml={report}"]
    environment = os.environ | {"GPU_TESTS": "dry", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert cases
    assert not [case for case in cases if case.find("skipped") is not None]
