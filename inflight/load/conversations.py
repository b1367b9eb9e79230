"""ShareGPT-style files: recorded conversations, of which the people's turns are sent again.

A file is a JSON array, or JSON lines, of objects with ``conversations``: a list of ``{"from": ..., "value": ...}`` in
which people and the assistant take turns. A ``system`` turn at the begin is the system prompt.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.load.scenario import ScenarioError
from inflight.load.traces import read_object

_PEOPLE = {"human", "user"}
_ASSISTANTS = {"gpt", "assistant", "chatgpt", "bing", "bard"}
_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON may have one alone; no encoding has, and so neither tokenizer nor transport takes it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One conversation."""

    system: str
    turns: tuple[tuple[str, str], ...]
    """What was asked and what was answered."""


def read_conversations(path: Path, max_turns: int | None = None) -> list[Recorded]:
    """Return the conversations of a file, each with at most ``max_turns``; those without a whole turn are left out.

    Raises:
        ScenarioError: one line that names the file, the entry and what is wrong with it, or that nothing is left.
    """
    found = [_recorded(path, number, entry, max_turns) for number, entry in enumerate(_entries(path), 1)]
    whole = [one for one in found if one.turns]
    if not whole:
        raise ScenarioError(f"{path}: no conversation has a turn of a person and an answer to it")
    return whole


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    if not text.lstrip().startswith("["):
        lines = enumerate(text.split("\n"), 1)
        return [read_object(path, number, line) for number, line in lines if line.strip()]
    try:
        return list(json.loads(text))
    except ValueError as error:
        raise ScenarioError(f"{path}: not valid JSON: {error}") from None


def _recorded(path: Path, number: int, entry: Any, max_turns: int | None) -> Recorded:
    said = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(said, list) or not all(_is_turn(one) for one in said):
        expected = '{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}'
        raise ScenarioError(f"{path}: conversation {number} is not {expected}")
    if any(_SURROGATE.search(one["value"]) for one in said):
        raise ScenarioError(f"{path}: conversation {number} has half a character, a lone surrogate")
    system = said[0]["value"] if said and said[0]["from"] == "system" else ""
    return Recorded(system, tuple(_turns(said)[:max_turns]))


def _is_turn(one: Any) -> bool:
    known = _PEOPLE | _ASSISTANTS | {"system"}
    return isinstance(one, dict) and one.get("from") in known and isinstance(one.get("value"), str)


def _turns(said: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    """Return each turn of a person with the answer that follows it; others have nothing to be replayed by."""
    return [
        (ask["value"], answer["value"])
        for ask, answer in itertools.pairwise(said)
        if ask["from"] in _PEOPLE and answer["from"] in _ASSISTANTS and ask["value"].strip()
    ]
