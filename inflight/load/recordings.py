"""Files of what was recorded: traces of a server's requests, and conversations of people with an assistant.

A trace is JSON lines or CSV with a header. Fields, as in the published Mooncake traces: ``timestamp`` (ms),
``input_length`` and ``output_length`` (tokens), ``hash_ids`` (optional; one id per block of the prompt, equal ids for
equal blocks after equal prefixes; in CSV separated by spaces).

A file of conversations, as ShareGPT's, is a JSON array or JSON lines of objects with ``conversations``: a list of
``{"from": ..., "value": ...}`` in which people and the assistant take turns. A ``system`` turn at the begin is the
system prompt. The people's turns are sent again.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from inflight.client.request import SURROGATE
from inflight.load.scenario import ScenarioError
from inflight.settings.section import explain

_PEOPLE = {"human", "user"}
_ASSISTANTS = {"gpt", "assistant", "chatgpt", "bing", "bard"}


class TraceRow(BaseModel):
    """One request of a trace; what else a line holds, as published traces do, is no part of a replay."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    timestamp: float = Field(ge=0)
    """Milliseconds from any origin."""
    input_length: int = Field(ge=1)
    output_length: int = Field(ge=1)
    hash_ids: tuple[NonNegativeInt, ...] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """Return the requests of a trace in the order of their times, the first at 0 ms.

    Raises:
        ScenarioError: one line that names the file, the line and what is wrong with it.
    """
    text, rows = _read(path), []
    for number, data in _table(path, text) if path.suffix == ".csv" else _objects(path, text):
        try:
            rows.append(TraceRow.model_validate(data))
        except ValidationError as error:
            raise ScenarioError(f"{path}: line {number}: {explain(error, TraceRow)}") from None
    if not rows:
        raise ScenarioError(f"{path}: the trace is empty")
    origin = min(row.timestamp for row in rows)
    shifted = [row.model_copy(update={"timestamp": row.timestamp - origin}) for row in rows]
    return sorted(shifted, key=lambda row: row.timestamp)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None


def _table(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            yield number, row | {"hash_ids": (row.get("hash_ids") or "").split()}
    except csv.Error as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None


def _objects(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON objects of a file's lines with the lines' numbers; a ScenarioError names the line that is none."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except ValueError as error:
            raise ScenarioError(f"{path}: line {number}: not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise ScenarioError(f"{path}: line {number}: a JSON object is expected")
        yield number, data


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
    text = _read(path)
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise ScenarioError(f"{path}: not valid JSON: {error}") from None
    else:
        entries = [entry for _, entry in _objects(path, text)]
    found = [_recorded(path, number, entry, max_turns) for number, entry in enumerate(entries, 1)]
    whole = [one for one in found if one.turns]
    if not whole:
        raise ScenarioError(f"{path}: no conversation has a turn of a person and an answer to it")
    return whole


def _recorded(path: Path, number: int, entry: Any, max_turns: int | None) -> Recorded:
    said = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(said, list) or not all(_is_turn(one) for one in said):
        expected = '{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}'
        raise ScenarioError(f"{path}: conversation {number} is not {expected}")
    if any(SURROGATE.search(one["value"]) for one in said):
        raise ScenarioError(f"{path}: conversation {number} has half a character, a lone surrogate")
    system = said[0]["value"] if said and said[0]["from"] == "system" else ""
    turns = [  # of a person, each with the answer that follows it; others have nothing to be replayed by
        (ask["value"], answer["value"])
        for ask, answer in itertools.pairwise(said)
        if ask["from"] in _PEOPLE and answer["from"] in _ASSISTANTS and ask["value"].strip()
    ]
    return Recorded(system, tuple(turns[:max_turns]))


def _is_turn(one: Any) -> bool:
    known = _PEOPLE | _ASSISTANTS | {"system"}
    return isinstance(one, dict) and one.get("from") in known and isinstance(one.get("value"), str)
