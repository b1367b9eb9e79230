"""Why tests of others fail here: each failure gets the first reason of a committed list that fits it.

A failure that none fits is shown as such, so that a new one is seen.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

REASONS = Path(__file__).with_name("reasons.toml")


class Kind(StrEnum):
    """What kind of reason it is."""

    PATH = "path not served"
    FIELD = "field refused by name"
    SCOPE = "not a feature of Inflight"
    MODEL = "needs a larger or another model"
    SETTING = "needs other settings of the server"
    OWN = "asserts the other server's own words or values"
    CHOICE = "answered otherwise on purpose"
    SUITE = "the test cannot run outside of its project"
    DEFECT = "defect of Inflight"
    UNSORTED = "without a reason"


@dataclass(frozen=True)
class Reason:
    """One entry of the list."""

    suite: str
    """The suite whose tests it is for."""
    kind: Kind
    why: str
    """A sentence for the reader."""
    test: re.Pattern[str]
    """What is found in the test's name, as pytest gives it."""
    says: re.Pattern[str]
    """What is found in the failure's text."""

    def fits(self, suite: str, outcome: Outcome) -> bool:
        """Whether it is the reason of a failure."""
        return self.suite == suite and bool(self.test.search(outcome.test) and self.says.search(outcome.says))


@dataclass(frozen=True)
class Outcome:
    """How one test ended."""

    test: str
    outcome: str
    """passed, failed or skipped"""
    says: str
    """Why it failed or was skipped."""


@dataclass(frozen=True)
class Sorted:
    """A failure with its reason."""

    outcome: Outcome
    kind: Kind
    why: str


def read_reasons(path: Path = REASONS) -> list[Reason]:
    """Return the committed list, in order.

    Raises:
        KeyError: an entry has no ``suite``, ``kind`` or ``why``.
        ValueError: a kind is unknown.
        re.error: a pattern is none.
    """
    return [_reason(entry) for entry in tomllib.loads(path.read_text())["reason"]]


def _reason(entry: Mapping[str, str]) -> Reason:
    test, says = (re.compile(entry.get(name, "")) for name in ("test", "says"))
    return Reason(entry["suite"], Kind[entry["kind"].upper()], entry["why"], test, says)


def sort(suite: str, outcomes: Iterable[Outcome], reasons: Sequence[Reason]) -> list[Sorted]:
    """Return the failures of a suite, each with the first reason that fits it."""
    return [_sorted(suite, one, reasons) for one in outcomes if one.outcome == "failed"]


def _sorted(suite: str, outcome: Outcome, reasons: Sequence[Reason]) -> Sorted:
    for reason in reasons:
        if reason.fits(suite, outcome):
            return Sorted(outcome, reason.kind, reason.why)
    return Sorted(outcome, Kind.UNSORTED, outcome.says[:160])


def unused(suite: str, failures: Iterable[Sorted], reasons: Iterable[Reason]) -> list[Reason]:
    """Return the reasons of a suite that no failure has: what they told of has been mended, or has another one."""
    told = {(one.kind, one.why) for one in failures}
    return [reason for reason in reasons if reason.suite == suite and (reason.kind, reason.why) not in told]
