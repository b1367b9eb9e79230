"""Shares tests out to processes of pytest: a part is a list of files and an expression of marks for one process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tests.runner.choice import Choice
from tests.runner.durations import Durations, share_out
from tests.runner.imports import ROOT

Verb = Literal["test", "check", "release"]
TEST = "not proof and not programs and not published"
COMPUTING = "not alone and not programs and not published and not proof(waits=True)"
SPARED = " and not release"
"""`make check` leaves these to `make release`."""
TOGETHER = ("tests/docker/", "tests/gateway/programs/", "tests/published/")
"""Folders whose long proofs look at the same images, environments or models, which take minutes to make or load."""
LISTS_A_WORKER = 4
LEAST_S = 60.0
"""A process takes some seconds to start what its tests share; so much of tests is worth it."""


@dataclass(frozen=True)
class Part:
    """The share of one process of pytest."""

    files: tuple[str, ...]
    marks: str
    seconds: float
    """By the durations on record."""
    profile: str = "dev"
    """How many examples of each property are tried: tests/support/properties.py."""
    waits: bool = False
    """It mostly waits: others run beside it, whatever the number of cores."""
    alone: bool = False
    """It measures times: nothing runs beside it."""

    @property
    def name(self) -> str:
        """The folders of its files, or its only file."""
        if len(self.files) == 1:
            return self.files[0]
        folders = dict.fromkeys(path.rpartition("/")[0] for path in self.files)
        return f"{len(self.files)} files of {', '.join(folders)}"


def parts_of(verb: Verb, choice: Choice, durations: Durations, workers: int) -> list[Part]:
    """Return the parts, in the order in which they begin.

    Args:
        verb: ``test`` leaves out the long proofs; ``release`` tries more examples of each property than ``check``.
        choice: the files.
        durations: of earlier runs.
        workers: how many processes compute at a time.
    """
    if verb == "test":
        return _shared_out(choice.tests, TEST, ("test",), durations, workers)
    profile, spared = ("dev", SPARED) if verb == "check" else ("soak", "")
    parts = [
        *_shared_out(choice.proofs, COMPUTING + spared, ("test", "proof"), durations, workers, profile),
        *_shared_out(choice.tests.keys() - choice.proofs.keys(), TEST, ("test",), durations, workers),
    ]
    for marks, kind, waits in (
        ("proof(waits=True)", "waits", True),
        ("programs", "programs", True),
        ("published", "published", False),
    ):
        for files in _together(_that_say(f"mark.{marks}", choice.proofs)):
            parts.append(Part(tuple(files), marks + spared, durations.sum(files, (kind,)), profile, waits))
    if alone := _that_say("mark.alone", choice.proofs):
        parts.append(Part(tuple(alone), "alone" + spared, durations.sum(alone, ("alone",)), profile, alone=True))
    return sorted(parts, key=lambda part: (part.alone, not part.waits, -part.seconds))


def _shared_out(
    paths: Iterable[str], marks: str, kinds: tuple[str, ...], durations: Durations, workers: int, profile: str = "dev"
) -> list[Part]:
    seconds = {path: durations.seconds(path, kinds) for path in sorted(paths)}
    most = max(LEAST_S, sum(seconds.values()) / (workers * LISTS_A_WORKER))
    lists = share_out(seconds, most)
    return [Part(tuple(files), marks, durations.sum(files, kinds), profile) for files in lists]


def _that_say(text: str, paths: Iterable[str]) -> list[str]:
    return [path for path in sorted(paths) if text in (ROOT / path).read_text()]


def _together(paths: list[str]) -> list[list[str]]:
    """Return the files of each folder of ``TOGETHER`` in one list, and each other file in one of its own."""
    lists: dict[str, list[str]] = {}
    for path in paths:
        lists.setdefault(next(filter(path.startswith, TOGETHER), path), []).append(path)
    return list(lists.values())
