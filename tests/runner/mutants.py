"""Mutants: recorded wrong changes of the source, and whether the tests that are chosen for each notice it.

    python -m tests.runner.mutants chosen    each mutant alone, under the tests that are chosen for it, until one fails
    python -m tests.runner.mutants others    all at once that a file of tests is not chosen for: none may fail

The second verb shows that no more mutants are noticed by all tests than by the chosen ones, at the price of one run of
all. Both change the checkout that they run in, which must have no changes of its own, and put it back. Results go to
docs/results/tests/mutants.json, and what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inflight.report.provenance import provenance
from tests.runner.choice import READ_ALL, RestsOn, choose, files_of_tests
from tests.runner.durations import Durations
from tests.runner.imports import ROOT
from tests.runner.parts import COMPUTING, SPARED, TEST
from tests.runner.processes import new_processes, run_pytest

MUTANTS = ROOT / "tests/facts/mutants.json"
RESULTS = ROOT / "docs/results/tests/mutants.json"
BLIND = {"tests/unit/test_mutants.py", *READ_ALL}
"""Tests that see the text of a file, and not what it does."""
LONG = f"proof and {COMPUTING}{SPARED}"
FILES_AT_A_TIME = 6
MOST_S = 300.0
"""A mutant that no test has noticed in so many seconds is told, and not written down."""


@dataclass(frozen=True)
class Mutant:
    """A wrong change of a file."""

    file: str
    old: str
    """It occurs once in the file."""
    new: str
    wrong: str
    """A user would see this go wrong."""


def read_mutants(path: Path = MUTANTS) -> list[Mutant]:
    """Return the recorded mutants."""
    return [Mutant(**one) for one in json.loads(path.read_text())]


def mutant_of(row: Mapping[str, Any]) -> Mutant:
    """Return the mutant of a row of the results."""
    return Mutant(row["file"], row["old"], row["new"], row["wrong"])


@contextmanager
def applied(mutants: Sequence[Mutant], root: Path = ROOT) -> Iterator[None]:
    """Change the checkout, and put it back at the end.

    Raises:
        ValueError: the text of a mutant does not occur in its file exactly once.
    """
    texts = {mutant.file: (root / mutant.file).read_text() for mutant in mutants}
    changed = dict(texts)
    for mutant in mutants:
        if changed[mutant.file].count(mutant.old) != 1:
            raise ValueError(f"{mutant.file} does not have {mutant.old!r} once")
        changed[mutant.file] = changed[mutant.file].replace(mutant.old, mutant.new)
    try:
        _write(changed, root)
        yield
    finally:
        _write(texts, root)


def _write(texts: Mapping[str, str], root: Path) -> None:
    for name, text in texts.items():
        (root / name).write_text(text)
    if any(name.startswith("native/") for name in texts):
        subprocess.run([sys.executable, "native/build.py"], cwd=root, check=True)


def likeliest_first(
    files: set[str], path: str, graph: Mapping[str, set[str]], seconds: Mapping[str, float] | None = None
) -> list[str]:
    """Return files in the order in which they are likely to notice a change of a path.

    Those whose names share most words with it are first; of these the nearest in the graph, and then the quickest.
    """
    seconds = seconds or {}
    words = _words(path)
    begin = [path, *(f"{parent}/" for parent in Path(path).parents), f"={path}"]
    distances = dict.fromkeys(begin, 0)
    todo = deque(begin)
    while todo:
        here = todo.popleft()
        for there in sorted(graph.get(here, ())):
            if there not in distances:
                distances[there] = distances[here] + 1
                todo.append(there)

    def rank(file: str) -> tuple[int, int, float, str]:
        shared = len(words & _words(file))
        return -shared, distances.get(file, len(distances)), seconds.get(file, 0.0), file

    return sorted(files, key=rank)


def _words(path: str) -> set[str]:
    return set(re.findall("[a-z]+", path)) - {"inflight", "tests", "test", "py"}


def run_until_one_fails(files: Sequence[str], marks: str) -> str:
    """Run files of tests; return the test that failed first, or nothing."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks, *files]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "output")
        process = new_processes(["tests.runner.imported"]).Process(target=run_pytest, args=(arguments, {}, output))
        process.start()
        process.join()
        said = output.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if process.exitcode in (0, 5):
        return ""
    return lines[-1].split(" ", 1)[1].split(" - ")[0] if lines else f"pytest ended with code {process.exitcode}"


def try_chosen(mutant: Mutant) -> dict[str, Any]:
    """Run what is chosen for a mutant until a test fails; return what came of it.

    Raises:
        TimeoutError: none has failed within ``MOST_S``.
    """
    choice, rests_on, began = choose([mutant.file]), RestsOn.of(ROOT), time.monotonic()
    durations, proven, runs = Durations.on_record(), set(choice.proofs) - BLIND, []
    for files, graph, marks, kind in (
        (proven, rests_on.narrow, TEST, "test"),
        (choice.tests.keys() - choice.proofs.keys() - BLIND, rests_on.wide, TEST, "test"),
        (proven, rests_on.narrow, LONG, "proof"),
    ):
        seconds = {path: durations.seconds(path, (kind,)) for path in files}
        ordered = likeliest_first(files, mutant.file, graph, seconds)
        batches = [(ordered[at : at + FILES_AT_A_TIME], marks) for at in range(0, len(ordered), FILES_AT_A_TIME)]
        if kind == "proof":  # those of the likeliest dozen of files come before the tests of others
            runs[1:1], batches = batches[:2], batches[2:]
        runs += batches
    with applied([mutant]):
        for files, marks in runs:
            failed = run_until_one_fails(files, marks)
            if failed:
                return {"noticed_by": failed, "marks": marks, "seconds": round(time.monotonic() - began)}
            if time.monotonic() - began > MOST_S:
                raise TimeoutError(f"no test has noticed in {MOST_S:.0f} s that: {mutant.wrong}")
    return {"noticed_by": "", "marks": "", "seconds": round(time.monotonic() - began)}


def others(mutants: Sequence[Mutant]) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    """Group the files of tests, with their marks, by the places of the mutants that ``choose`` leaves them out for."""
    choices = [choose([mutant.file]) for mutant in mutants]
    groups: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    for test in set(files_of_tests()) - BLIND:
        for marks, chosen in (
            (TEST, [test in choice.tests for choice in choices]),
            (LONG, [test in choice.proofs for choice in choices]),
        ):
            left_out = tuple(place for place, one in enumerate(chosen) if not one)
            groups.setdefault(left_out, []).append((test, marks))
    return groups


def try_others(mutants: Sequence[Mutant]) -> Iterator[dict[str, Any]]:
    """Run each test with all mutants at once that it is not chosen for; yield what failed."""
    for places, tests in others(mutants).items():
        with applied([mutants[place] for place in places]):
            for marks in dict.fromkeys(marks for _, marks in tests):
                files = [test for test, its in tests if its == marks]
                failed = run_until_one_fails(files, marks)
                print(f"{len(places)} mutants, {len(files)} files: {failed or 'not noticed'}", flush=True)
                if failed:
                    yield {"failed": failed, "mutants": [mutants[place].wrong for place in places]}


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("chosen", "others"))
    parser.add_argument("--part", default="0/1", help="which share of the mutants, e.g. 1/2: every second one")
    options = parser.parse_args()
    place, shares = map(int, options.part.split("/"))
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"rows": []}
    if options.verb == "others":
        results["others"] = list(try_others(read_mutants()))
        RESULTS.write_text(json.dumps({**results, **provenance()}, indent=1) + "\n")
        return
    mutants = read_mutants()
    rows = {mutant_of(row): row for row in results["rows"]}
    for mutant in mutants[place::shares]:
        if mutant in rows:
            continue
        try:
            found = try_chosen(mutant)
        except TimeoutError as error:
            print(error, flush=True)
            continue
        marks = found.pop("marks")
        if found["noticed_by"] and (failed := run_until_one_fails([found["noticed_by"]], marks)):
            sys.exit(f"{failed} fails without the mutant, too")
        rows[mutant] = row = {**asdict(mutant), **found, "commit": provenance()["commit"]}
        print(f"{row['seconds']:5} s  {mutant.file}: {row['noticed_by'] or 'NOT NOTICED'}", flush=True)
        results["rows"] = [rows[one] for one in mutants if one in rows]  # of a mutant that has changed none is left
        RESULTS.write_text(json.dumps({**results, **provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
