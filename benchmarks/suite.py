"""How long Inflight's own tests take, alone or beside a neighbour that takes the cores away, and which of them fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer

from benchmarks.command import FOLDER, command_line, console
from benchmarks.result import write_results
from inflight.engine.native.bindings import instruction_sets
from inflight.errors import DeploymentError
from inflight.report.failures import one_line_errors
from inflight.report.table import print_table
from inflight.resources import ROOT

Verb = Literal["test", "release", "ci"]
COMMANDS: dict[Verb, list[str]] = {"test": ["make", "test"], "release": ["make", "release"], "ci": [".ci/run"]}
_COUNT = re.compile(r"^(?P<passed>\d+) passed, (?P<failed>\d+) failed, (?P<skipped>\d+) skipped$", re.MULTILINE)
_REPEATED = re.compile(r"^Tried again: (\d+)$", re.MULTILINE)
_FAILED = re.compile(r"^FAILED (.{1,200})", re.MULTILINE)
"""An id may have a text of many thousand letters in it."""
_MAKE = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "ARGS")
"""The environment by which one make hands its arguments to another, which are not those of the tests."""
NEIGHBOUR = [sys.executable, str(ROOT / "tests/support/busy_neighbour.py")]
"""This program takes the cores away; it says so in a line."""


@dataclass(frozen=True)
class SuiteRun:
    """One run of a command that runs tests."""

    command: str
    changed: str
    """The file that a clean clone of the commit had a line more of; of "" the checkout itself was tested."""
    neighbour: str
    """What ran beside it."""
    minutes: float
    passed: int
    failed: int
    """Tests that failed, files that could not be read, and processes that ended before their tests."""
    skipped: int
    repeated: int
    """Tests that were tried again because the machine was disturbed."""
    stolen_s: float
    """Seconds of processor time that other guests of the host took."""
    code: int
    """The exit code."""
    failures: str
    """The names of what failed."""
    commit: str
    instructions: str
    """The processor's best instruction set, named as in ``engine.cpu_step``."""
    finished: str
    """When it ended, UTC."""


def suite(
    verb: Annotated[Verb, typer.Option(help="What runs the tests: make test, make release or .ci/run.")] = "test",
    runs: Annotated[int, typer.Option(min=1, help="How often.")] = 3,
    beside_neighbour: Annotated[
        bool, typer.Option(help="Take all cores away for up to a second at a time meanwhile; that needs root.")
    ] = False,
    changed: Annotated[
        str, typer.Option(help="Run in a clean clone where this file has a line more, and BASE is the commit.")
    ] = "",
    output: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Add the runs to those of this JSON file.")
    ] = None,
) -> None:
    """Run Inflight's own tests several times: how long they take, and which of them fail."""
    known = json.loads(output.read_text())["rows"] if output is not None and output.is_file() else []
    made: list[SuiteRun] = []
    options = f"--verb {verb} --runs {runs}" + " --beside-neighbour" * beside_neighbour
    options += f" --changed {changed}" if changed else ""
    with one_line_errors(console):
        for place in range(runs):
            log = FOLDER / f"suite-{len(known) + place + 1}.log"
            console.print(f"run {place + 1} of {runs}; its output goes to {log}")
            run = run_suite(COMMANDS[verb], beside_neighbour, log, changed)
            made.append(run)
            console.print(f"{run.minutes} minutes, exit code {run.code} {run.failures}")
            if output is not None:  # after each run, so that none is lost
                write_results(output, command_line("suite", options), [*known, *map(asdict, made)])
    print_table("Inflight's own tests", [asdict(run) for run in made])


def run_suite(command: Sequence[str], beside_neighbour: bool, log: Path, changed: str = "") -> SuiteRun:
    """Run a command that runs tests once, from the root of the checkout or of a clone.

    Args:
        command: program and arguments.
        beside_neighbour: whether ``tests/support/busy_neighbour.py`` takes all cores for up to a second at a time.
        log: where the command's output goes.
        changed: a file that has a line more in a clone; without it the checkout is tested as it is.

    Raises:
        DeploymentError: the neighbour cannot run here or ended before the command, or there is no such file.
    """
    # Of this run, whatever is committed meanwhile: provenance() is that of the process.
    describe = ["git", "describe", "--always", "--abbrev=12", *(["--dirty"] if not changed else [])]
    commit = subprocess.check_output(describe, cwd=ROOT, text=True).strip()
    instructions = next(iter(instruction_sets()), "none")
    environment = {name: value for name, value in os.environ.items() if name not in _MAKE}
    if changed:
        environment["BASE"] = commit
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as output,
        _clone(commit, changed) if changed else nullcontext(ROOT) as root,
        _neighbour() if beside_neighbour else nullcontext(),
    ):
        stolen, began = psutil.cpu_times().steal, time.monotonic()
        done = subprocess.run(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
        seconds, stolen = time.monotonic() - began, psutil.cpu_times().steal - stolen
    said = log.read_text(errors="replace")
    counts = count_results(said)
    return SuiteRun(
        command=" ".join(command),
        changed=changed,
        neighbour="all cores for up to 1 s at a time" if beside_neighbour else "none",
        minutes=round(seconds / 60, 2),
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        repeated=counts["repeated"],
        stolen_s=round(stolen, 1),
        code=done.returncode,
        failures=", ".join(dict.fromkeys(_FAILED.findall(said.rpartition("\nTried again: ")[2]))),
        commit=commit,
        instructions=instructions,
        finished=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
    )


def count_results(said: str) -> Counter[str]:
    """Return how many tests passed, failed and so on, by the last lines of ``tests.runner`` in an output."""
    counts: Counter[str] = Counter()
    for line in _COUNT.finditer(said):
        counts.update({kind: int(number) for kind, number in line.groupdict().items()})
    counts["repeated"] = sum(map(int, _REPEATED.findall(said)))
    return counts


@contextmanager
def _clone(commit: str, changed: str) -> Iterator[Path]:
    """Clone a commit, and add a line to a file: to code a comment that its formatter leaves."""
    with tempfile.TemporaryDirectory(prefix="inflight-suite-") as folder:
        clone = Path(folder, "inflight")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "reset", "--quiet", "--hard", commit], cwd=clone, check=True)
        if not (clone / changed).is_file():
            raise DeploymentError(f"--changed {changed}: the commit has no such file")
        with (clone / changed).open("a") as file:
            file.write("\n\n# a change\n" if changed.endswith(".py") else "\n")
        yield clone


@contextmanager
def _neighbour() -> Iterator[None]:
    """Let the neighbour run, from the moment at which it begins to take the cores."""
    with subprocess.Popen(NEIGHBOUR, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stderr is not None
        if not neighbour.stdout.readline():
            raise DeploymentError(neighbour.stderr.read().strip())
        try:
            yield
            if neighbour.poll() is not None:
                raise DeploymentError(f"the neighbour ended before the run: {neighbour.stderr.read().strip()}")
        finally:
            neighbour.terminate()
