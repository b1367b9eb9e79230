"""Recorded traces: when requests came, how long they were, and which prefix blocks they shared.

A trace is JSON lines or CSV with a header. Fields, as in the published Mooncake traces: ``timestamp`` (ms),
``input_length`` and ``output_length`` (tokens), ``hash_ids`` (optional; one id per block of the prompt, equal ids for
equal blocks after equal prefixes; in CSV separated by spaces).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from inflight.explain import explain
from inflight.load.scenario import ScenarioError


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
    try:
        rows = [_row(path, number, data) for number, data in _lines(path)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise ScenarioError(f"{path}: the trace is empty")
    origin = min(row.timestamp for row in rows)
    shifted = [row.model_copy(update={"timestamp": row.timestamp - origin}) for row in rows]
    return sorted(shifted, key=lambda row: row.timestamp)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            for number, row in enumerate(csv.DictReader(file), 2):
                yield number, row | {"hash_ids": (row.get("hash_ids") or "").split()}
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, read_object(path, number, line)


def read_object(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the JSON object of one line of a file; ``number`` is named in the ScenarioError for a bad one."""
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ScenarioError(f"{path}: line {number}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ScenarioError(f"{path}: line {number}: a JSON object is expected")
    return data


def _row(path: Path, number: int, data: dict[str, Any]) -> TraceRow:
    try:
        return TraceRow.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(f"{path}: line {number}: {explain(error, TraceRow)}") from None
