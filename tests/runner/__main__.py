"""Runs Inflight's tests in a few processes, each of which reads only the files that it runs.

    python -m tests.runner test       the tests, without the long proofs and the benches
    python -m tests.runner check      the tests and long proofs that the change since --base can reach
    python -m tests.runner release    all of them, with many more examples of each property
    python -m tests.runner needs      what the proofs of `check` need besides the virtual environment: docker, clients,
                                      published

``needs`` runs on the system's own Python.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.runner.base import PASSED, Base, find_base
from tests.runner.choice import Choice, changed_files, choose, files_of_tests
from tests.runner.durations import RECORD, Durations
from tests.runner.parts import parts_of
from tests.runner.processes import Runner
from tests.runner.report import Report

BENCHES = "tests/benchmarks/"
"""`make test` leaves these files out: nothing is served by a bench."""
NEEDS = {"docker": "tests/docker/", "clients": "tests/gateway/programs/", "published": "tests/published/"}
"""`.ci/run` installs these for the proofs of a folder."""


def main() -> int:
    """Run what the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("test", "check", "release", "needs"))
    parser.add_argument("--base", help="a commit whose proofs have all passed; without it: tests/runner/base.py")
    # Of two processes on two cores, or three, many wait: for servers, clients and time.
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1) + 2, help="processes at a time; some wait"
    )
    parser.add_argument("--record", action="store_true", help="write the durations and what passed on record")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    options = parser.parse_args()
    try:
        choice, why = _chosen(options.verb, options.base)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.verb == "needs":
        print(*(need for need, folder in NEEDS.items() if any(path.startswith(folder) for path in choice.proofs)))
        return 0
    durations = Durations.on_record()
    parts = parts_of(options.verb, choice, durations, options.workers)
    report = Report(parts, durations)
    report.begin(choice, why)
    if options.list:
        return 0
    imported = ["tests.runner.imported"] if len(parts) > options.workers else []
    with tempfile.TemporaryDirectory(prefix="inflight-tests-") as folder:
        try:
            Runner(options.workers, Path(folder), report.part, progress=report.progress, imported=imported).run(parts)
        except KeyboardInterrupt:
            return 130
    usual = options.verb != "release"  # whose properties have more examples, and take longer
    whole = options.verb != "test" and len(choice.proofs) == len(files_of_tests())
    return report.end(RECORD if options.record and usual else None, PASSED if options.record and whole else None)


def _chosen(verb: str, given: str | None) -> tuple[Choice, str]:
    """Return the files, and in words why these."""
    every = dict.fromkeys(files_of_tests(), "")
    if verb == "test":
        return Choice({path: "" for path in every if not path.startswith(BENCHES)}, every), "all files but the benches'"
    if verb == "release":
        return Choice(every, every), "all files"
    base: Base | None = find_base(given)
    if base is None:
        return Choice(every, every), "all files, since no commit is known at which all proofs passed"
    changed = changed_files(base.commit)
    return choose(changed), f"{len(changed)} files differ from {base.commit[:12]}, {base.why}"


if __name__ == "__main__":
    sys.exit(main())
