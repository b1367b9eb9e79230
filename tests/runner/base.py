"""Finds the commit since which a change counts: one at which every proof has passed."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.runner.imports import ROOT

PASSED = ROOT / "docs/results/tests/passed.json"
"""The last run of `make check` or `make release` on record that left no file out, and in which everything passed."""


@dataclass(frozen=True)
class Base:
    """A commit, and in words why it was taken."""

    commit: str
    why: str


def find_base(given: str | None = None, root: Path = ROOT, passed: Path = PASSED) -> Base | None:
    """Return the commit given or named by BASE, the merge base with the upstream branch, or the last on record.

    A checkout that has nothing of its own beside the upstream branch, e.g. one of the branch itself, has no merge base.
    None: none of these is there, so that everything has to be proven.

    Raises:
        ValueError: the commit that is given is not there.
    """
    if given or (given := os.environ.get("BASE")):
        commit = _commit(root, given)
        if commit is None:
            raise ValueError(f"there is no commit {given!r} here")
        return Base(commit, "as it was given")
    head = _commit(root, "HEAD")
    for upstream in ("@{upstream}", "origin/HEAD", "origin/main"):
        merged = _git(root, "merge-base", "HEAD", upstream)
        if merged and merged != head:
            return Base(merged, f"the merge base with {upstream}")
    if passed.is_file():
        commit = _commit(root, json.loads(passed.read_text())["commit"])
        if commit is not None and _git(root, "merge-base", commit, "HEAD") == commit:
            return Base(commit, "at which everything passed")
    return None


def _commit(root: Path, name: str) -> str | None:
    return _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")


def _git(root: Path, *words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
