"""The two sides of a comparison: result directories, read, and refused where they measured different things."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.load.compare.samples import Run
from inflight.load.result import SUMMARY, ResultError, read_records, read_summary
from inflight.load.scenario import Slo

_SAME = ("machine", "transport", "deployment")
_SAME_PARTS = ("scenario", "files")
"""What is compared key by key; the hashes tell of a file that kept its name."""


class CompareError(ResultError):
    """Results that are not to be compared; the message is one line."""


@dataclass(frozen=True)
class Side:
    """One or several runs of the same test."""

    name: str
    summaries: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]

    @property
    def title(self) -> str:
        """What it is, in a line."""
        commits = sorted({str(one["commit"]) for one in self.summaries})
        runs = "1 run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"{self.name}: {runs}, client commit {', '.join(commits)}, {self.summaries[0]['date']}"

    @property
    def warnings(self) -> list[str]:
        """Why its figures may not be the server's, a line each."""
        lines = []
        for one in self.summaries:
            if one["client"]["bottleneck"]:
                lines.append(f"{self.name}: the client was a bottleneck: {'; '.join(one['client']['reasons'])}")
            if one["interrupted"]:
                lines.append(f"{self.name}: a test was interrupted")
        return lines


def read_side(name: str, directory: Path) -> Side:
    """Read a result directory, or a directory of several: the repeats of one test.

    Raises:
        ResultError: there is none, or it cannot be read.
    """
    found = (
        [directory]
        if (directory / SUMMARY).is_file()
        else sorted(path.parent for path in directory.glob(f"*/{SUMMARY}"))
    )
    if not found:
        raise CompareError(f"{directory}: neither a result of `inflight load run` nor a directory of such")
    summaries = tuple(read_summary(one) for one in found)
    runs = tuple(_run(one, summary) for one, summary in zip(found, summaries, strict=True))
    return Side(name, summaries, runs)


def _run(directory: Path, summary: dict[str, Any]) -> Run:
    records = read_records(directory)
    try:
        scenario = summary["scenario"]
        own = {one["name"]: one.get("slo") for one in scenario.get("classes", ())}
        names = {one.class_name for one in records}
        slo_of = {name: Slo.model_validate(own.get(name) or scenario.get("slo") or {}) for name in names}
        begin, end = summary["figures"]["window_s"]
    except (KeyError, TypeError, ValueError) as error:
        raise CompareError(f"{directory / SUMMARY}: not a summary of `inflight load run`: {error!r}") from None
    if not any(begin <= one.start_s < end for one in records):
        raise CompareError(f"{directory}: no request started in the measured window")
    return Run(records, (begin, end), slo_of)


def differences(sides: Sequence[Side]) -> list[str]:
    """Return by name what the runs do not have in common and should; what is compared is the server alone."""
    first, *rest = [one for side in sides for one in side.summaries]
    found = []
    for one in rest:
        for part in _SAME_PARTS:
            here, there = first.get(part, {}), one.get(part, {})
            found += [f"{part}.{key}" for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
        pairs = [(name, first.get(name, ""), one.get(name, "")) for name in _SAME]
        found += [f"{name} ({mine} and {other})" for name, mine, other in pairs if mine != other]
    seeds = [sorted(one["seed"] for one in side.summaries) for side in sides]
    if seeds[0] != seeds[1]:
        found.append(f"seed ({_listed(seeds[0])} and {_listed(seeds[1])})")
    return list(dict.fromkeys(found))


def check_comparable(sides: Sequence[Side], force: bool) -> list[str]:
    """Return what differs although it should not.

    Raises:
        CompareError: something does, and ``force`` is not set.
    """
    found = differences(sides)
    if found and not force:
        raise CompareError(f"the two differ in {', '.join(found)}; --force compares them all the same")
    return found


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
