"""Says what runs and what was left out, how it goes on, and at the end what failed, was repeated or was slow."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from inflight.report.provenance import provenance
from tests.runner.choice import Choice, by_folder, files_of_tests
from tests.runner.durations import Durations
from tests.runner.parts import Part
from tests.runner.processes import Result

SLOWEST = 40
LONG_S = 60.0
"""A test that has run so long is named meanwhile."""


class Report:
    """Prints a run as it goes."""

    def __init__(self, parts: Sequence[Part], durations: Durations) -> None:
        self._parts, self._known = parts, durations
        self._results: list[Result] = []
        self._began = time.monotonic()

    def begin(self, choice: Choice, why: str) -> None:
        """Say what was chosen, and which proofs were left out."""
        expected = sum(part.seconds for part in self._parts) / 60
        say(f"{why}: {len(self._parts)} processes; their tests took {expected:.0f} minutes at the last record")
        for title, files in (("tests", choice.tests), ("long proofs", choice.proofs)):
            left_out = {path: "" for path in files_of_tests() if path not in files}
            if files and left_out:
                reasons = Counter(files.values()).most_common(3)
                say(f"  {title} of {_folders(files)}: reached by {', '.join(path for path, _ in reasons)}")
            if left_out:
                say(f"  {title} left out, which the change does not reach: {_folders(left_out)}")

    def part(self, result: Result) -> None:
        """Say that a part has ended; of one in which a test failed, print what its process printed."""
        self._results.append(result)
        place = f"{self._time()}  {len(self._results)} of {len(self._parts)}"
        say(f"{place}  {result.part.name}: {_counts(result.counts)} in {result.seconds:.0f} s")
        if result.failed:
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
            passed: where it is written that everything has passed, if it has and the checkout is that of a commit.
        """
        ended = [one for result in self._results for one in result.ended]
        say(f"\nThe slowest {SLOWEST}, and what they took on record:")
        for one in sorted(ended, key=lambda one: -one.seconds)[:SLOWEST]:
            known = self._known.slow.get(one.test)
            say(f"  {one.seconds:6.1f} s  {f'{known:6.1f} s' if known else '       -'}  {one.test}")
        if record is not None:
            self._known.updated((one.test, one.kind, one.seconds) for one in ended).write(record, **provenance())
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
        made = {**provenance(), "minutes": round((time.monotonic() - self._began) / 60, 1), **counts}
        if passed is not None and not counts["failed"] and not str(made["commit"]).endswith("-dirty"):
            passed.write_text(json.dumps(made, indent=1) + "\n")
            say(f"that everything has passed stands in {passed}")
        say(_counts(counts))
        return int(counts["failed"] > 0 or bool(self._parts and not ended))


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def _folders(files: dict[str, str]) -> str:
    return ", ".join(f"{folder} ({number})" for folder, number in sorted(by_folder(files).items()))
