"""Says what runs and what was left out, how it goes on, and at the end what failed, was repeated or was slow."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from inflight.report.provenance import provenance
from tests.runner.choice import Choice, by_folder, changed_files, files_of_tests
from tests.runner.durations import RECORD, Durations
from tests.runner.imports import ROOT
from tests.runner.parts import Part
from tests.runner.processes import Result

SLOWEST = 40
LONG_S = 60.0
"""A test that has run so long is named meanwhile."""


class Report:
    """Prints a run as it goes, of what is checked out when it is made."""

    def __init__(self, parts: Sequence[Part], durations: Durations) -> None:
        self._parts, self._known, self._provenance = parts, durations, provenance()
        self._results: list[Result] = []
        self._began = time.monotonic()

    def begin(self, choice: Choice, why: str) -> None:
        """Say what was chosen, and which proofs were left out."""
        expected = sum(part.seconds for part in self._parts) / 60
        say(f"{why}: {len(self._parts)} processes; their tests took {expected:.0f} minutes at the last record")
        for title, files in (("tests", choice.tests), ("long proofs", choice.proofs)):
            left_out = {path: "" for path in files_of_tests() if path not in files}
            if files and not any(files.values()):
                continue  # no change chose them
            if files and left_out:
                reasons = Counter(files.values()).most_common(3)
                say(f"  {title} of {_folders(files)}: reached by {', '.join(path for path, _ in reasons)}")
            if left_out:
                say(f"  {title} left out, which the change does not reach: {_folders(left_out)}")

    def part(self, result: Result) -> None:
        """Say that a part has ended; print what its process printed where a test failed, be it once."""
        self._results.append(result)
        place = f"{self._time()}  {len(self._results)} of {len(self._parts)}"
        say(f"{place}  {result.part.name}: {_counts(result.counts)} in {result.seconds:.0f} s")
        if result.failed or result.repeated:
            say(result.output)
        if result.broke:
            say(f"{result.part.name}: {result.broke}; what comes after it did not run")

    def progress(self, ended: int, seconds: float, test: str) -> None:
        """Say how many tests have ended, and which one takes long."""
        slow = f"; for {seconds:.0f} s: {test}" if seconds >= LONG_S else ""
        say(f"{self._time()}  {ended} tests have ended{slow}")

    def _time(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes:3}:{seconds:02}"

    def end(self, record: Path | None, passed: Path | None = None) -> int:
        """Say what was slow, repeated and failed; return the exit code.

        Args:
            record: where the durations are written to, if they are usual ones.
            passed: where it is written that everything has passed, if it has and the checkout is still the commit's.
        """
        ended = [one for result in self._results for one in result.ended]
        say(f"\nThe slowest {SLOWEST}, and what they took on record:")
        for one in sorted(ended, key=lambda one: -one.seconds)[:SLOWEST]:
            known = self._known.slow.get(one.test)
            say(f"  {one.seconds:6.1f} s  {f'{known:6.1f} s' if known else '       -'}  {one.test}")
        if record is not None:
            whole = (one for result in self._results if not result.broke for one in result.ended)
            updated = self._known.updated((one.test, one.kind, one.seconds) for one in whole)
            updated.write(record, **self._provenance)
        repeated = [one for result in self._results for one in result.repeated]
        say(f"\nTried again: {len(repeated)}")
        for test, cause in repeated:
            say(f"  {test}: {cause}")
        for result in self._results:
            for one in result.ended:
                if one.outcome == "failed":
                    say(f"FAILED {one.test}")
            if result.broke:
                say(f"FAILED {result.part.name}: {result.broke}")
        counts = sum((result.counts for result in self._results), Counter[str]())
        lost = len(self._parts) - len(self._results)
        if lost:
            say(f"FAILED {lost} of {len(self._parts)} processes told nothing")
        counts["failed"] += sum(bool(result.broke) for result in self._results) + lost
        if passed is not None and not counts["failed"]:
            self._write_passed(passed, counts)
        say(_counts(counts))
        return int(counts["failed"] > 0 or bool(self._parts and not ended))

    def _write_passed(self, path: Path, counts: Counter[str]) -> None:
        commit = str(self._provenance["commit"])
        if commit.endswith("-dirty"):
            say("that everything has passed is not written down: the checkout had changes of its own")
        elif changed_files(commit) - {str(RECORD.relative_to(ROOT))}:
            say(f"that everything has passed is not written down: the checkout is {commit}'s no more")
        else:
            minutes = round((time.monotonic() - self._began) / 60, 1)
            path.write_text(json.dumps({**self._provenance, "minutes": minutes, **counts}, indent=1) + "\n")
            say(f"that everything has passed stands in {path}")


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def _folders(files: dict[str, str]) -> str:
    return ", ".join(f"{folder} ({number})" for folder, number in sorted(by_folder(files).items()))
