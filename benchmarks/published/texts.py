"""Prose that no published model has learnt: this project's own decisions."""

from __future__ import annotations

from inflight.resources import ROOT

FOLDER = "docs/decisions"


def decisions() -> str:
    """Return the pages about decisions, in order: some 8,000 tokens of English."""
    return "\n".join(path.read_text() for path in sorted((ROOT / FOLDER).glob("*.md")))
