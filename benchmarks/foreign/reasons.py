"""Why tests of others fail here: each failure gets the first reason of a committed list that fits it.

A failure that none fits is shown as such, so that a new one is seen.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
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
    says: re.Pattern[str]
    """What is found in the failure's text."""
    tests: tuple[str, ...] = ()
    """The tests that it is of, without their cases, by the ends of their names; none: any test of the suite."""
    case: re.Pattern[str] = re.compile("")
    """What is found in the test's case, as pytest gives it in brackets."""

    def fits(self, suite: str, outcome: Outcome) -> bool:
        """Whether it is the reason of a failure."""
        test, _, case = outcome.test.partition("[")
        of_it = not self.tests or any(f"/{test}".endswith(f"/{name}") for name in self.tests)
        if self.suite != suite or not of_it:
            return False
        return bool(self.case.search(case.removesuffix("]")) and self.says.search(outcome.says))


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
    reason: Reason | None
    """None: no entry of the list fits it."""

    @property
    def kind(self) -> Kind:
        """What kind of reason it is."""
        return self.reason.kind if self.reason else Kind.UNSORTED

    @property
    def why(self) -> str:
        """The sentence of its reason; without one the test, and what the failure says."""
        return self.reason.why if self.reason else f"{self.outcome.test}: {self.outcome.says[:160]}"


def read_reasons(path: Path = REASONS) -> list[Reason]:
    """Return the committed list, in order.

    Raises:
        KeyError: a kind is unknown.
        TypeError: an entry has no ``suite``, ``kind``, ``why`` or ``says``, or something else.
        re.error: a pattern is none.
    """
    return [_reason(**entry) for entry in tomllib.loads(path.read_text())["reason"]]


def _reason(suite: str, kind: str, why: str, says: str, tests: Sequence[str] = (), case: str = "") -> Reason:
    return Reason(suite, Kind[kind.upper()], why, re.compile(says), tuple(tests), re.compile(case))


def sort(suite: str, outcomes: Iterable[Outcome], reasons: Sequence[Reason]) -> list[Sorted]:
    """Return the failures of a suite, each with the first reason that fits it."""
    failures = [one for one in outcomes if one.outcome == "failed"]
    return [Sorted(one, next((reason for reason in reasons if reason.fits(suite, one)), None)) for one in failures]


def unused(suite: str, failures: Iterable[Sorted], reasons: Iterable[Reason]) -> list[Reason]:
    """Return the entries of a suite that no failure has: what they told of has been mended, or has another one."""
    used = {id(one.reason) for one in failures}
    return [reason for reason in reasons if reason.suite == suite and id(reason) not in used]
