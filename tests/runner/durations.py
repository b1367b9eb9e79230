"""The durations on record, and how files of tests are shared out by them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.runner.imports import ROOT

RECORD = ROOT / "docs/results/tests/durations.json"
UNKNOWN_S = 5.0
"""A file that is not on record is taken to last so long."""
SLOW_S = 5.0
"""Tests that take as long stand on record by name."""


@dataclass
class Durations:
    """Seconds by the wall clock, in a run whose processes shared the cores."""

    files: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by file, and by the kind of its tests."""
    slow: dict[str, float] = field(default_factory=dict)
    """Seconds by test, of slow ones."""

    @classmethod
    def on_record(cls, path: Path = RECORD) -> Durations:
        """Read the record; without one all durations are unknown."""
        if not path.is_file():
            return cls()
        record = json.loads(path.read_text())
        return cls(record["files"], record["slow"])

    def seconds(self, path: str, kinds: Iterable[str]) -> float:
        """Return how long the tests of these kinds take in a file."""
        known = self.files.get(path)
        return UNKNOWN_S if known is None else sum(known.get(kind, 0.0) for kind in kinds)

    def sum(self, paths: Iterable[str], kinds: Iterable[str]) -> float:
        """Return how long the tests of these kinds take in some files."""
        return sum(self.seconds(path, kinds) for path in paths)

    def updated(self, ended: Iterable[tuple[str, str, float]]) -> Durations:
        """Return these durations with those of a run in place of what they have of its files.

        Args:
            ended: tests, each with its kind and its seconds.
        """
        files: dict[str, dict[str, float]] = {}
        slow: dict[str, float] = {}
        ran = set[str]()
        for test, kind, seconds in ended:
            ran.add(test)
            kinds = files.setdefault(test.partition("::")[0], {})
            kinds[kind] = kinds.get(kind, 0.0) + seconds
            if seconds >= SLOW_S:
                slow[test] = seconds
        proven = {path for path, kinds in files.items() if kinds.keys() - {"test"}}
        kept = {test: s for test, s in self.slow.items() if test.partition("::")[0] not in proven and test not in ran}
        for path, kinds in files.items():  # a run of some proofs of a file has all of its tests
            files[path] = {kind: s for kind, s in self.files.get(path, {}).items() if kind != "test"} | kinds
        return Durations(self.files | files, kept | slow)

    def write(self, path: Path, **provenance: str) -> None:
        """Write all, with what says where it was measured."""
        files = {
            name: {kind: round(seconds, 1) for kind, seconds in sorted(kinds.items())}
            for name, kinds in sorted(self.files.items())
        }
        slow = {test: round(seconds, 1) for test, seconds in sorted(self.slow.items())}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**provenance, "files": files, "slow": slow}, indent=1) + "\n")


def share_out(seconds: Mapping[str, float], most_s: float) -> list[list[str]]:
    """Cut files into lists of ``most_s`` seconds; the longest comes first, and neighbours stay together.

    Args:
        seconds: what each file takes.
        most_s: what a list takes at the most, unless it has one file only.
    """
    lists: list[list[str]] = [[]]
    taken = 0.0
    for path in sorted(seconds):
        if taken + seconds[path] > most_s:
            lists.append([])
            taken = 0.0
        lists[-1].append(path)
        taken += seconds[path]
    return sorted(filter(None, lists), key=lambda paths: -sum(seconds[path] for path in paths))
