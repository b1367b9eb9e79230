"""Prose that no published model has learnt: this project's own."""

from __future__ import annotations

import json

from inflight.resources import HELD_OUT_PROSE, ROOT

FOLDER = "docs/decisions"


def decisions() -> str:
    """Return the pages about decisions, in order: some 8,000 tokens of English."""
    return "\n".join(path.read_text() for path in sorted((ROOT / FOLDER).glob("*.md")))


def held_out() -> str:
    """Return the prose of the data that builds are measured with and not calibrated: some 24,000 tokens of English."""
    rows = map(json.loads, HELD_OUT_PROSE.read_text(encoding="utf-8").splitlines())
    return "\n\n".join(row["text"] for row in rows)
