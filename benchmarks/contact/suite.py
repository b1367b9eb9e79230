"""tests/gpu, with a process for several tests at once, one of which may spoil its process and no other."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.contact.stage import Contact

_WORKERS, _TEST_S = 6, 90


def suite(contact: Contact, _case: str) -> None:
    """Run the tests, and write the verdict of each that failed."""
    report = contact.folder / "gpu.xml"
    report.unlink(missing_ok=True)  # an earlier call's
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", "-rs", f"--junitxml={report}"]
    if importlib.util.find_spec("pytest_timeout"):
        command.append(f"--timeout={_TEST_S}")
    if importlib.util.find_spec("xdist") and not contact.dry:
        command += ["-n", str(_WORKERS), "--dist", "load"]
    status = subprocess.run(
        command, env=os.environ | {"GPU_TESTS": "dry" if contact.dry else ""}, check=False
    ).returncode
    contact.recorder.add("pytest's exit status", status, good=status == 0)
    if report.is_file():
        record(contact, report)


def record(contact: Contact, report: Path) -> None:
    """Write what a report of pytest (JUnit's XML) says."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    for case in failed:
        fault = case.find("failure") if case.find("failure") is not None else case.find("error")
        assert fault is not None, "that is how it was chosen"
        contact.recorder.add(str(case.get("name")), "failed", good=False, note=str(fault.get("message"))[:200])
    contact.recorder.add("tests passed", len(cases) - len(failed) - skipped, note=f"{skipped} skipped")
