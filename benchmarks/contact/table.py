"""The table at the end of a call: prediction beside measurement, at most 60 lines, narrow enough to be sent as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_LINES = 60
_PREDICTIONS = Path("docs/results/gpu/predictions.json")
_WIDTH = 118
_NAME, _VALUE = 46, 12


def predictions() -> dict[str, float]:
    """Return the values that are predicted, by the names of results; none where the file is not here."""
    if not _PREDICTIONS.is_file():
        return {}
    return {row["result"]: row["now"] for row in json.loads(_PREDICTIONS.read_text())["rows"]}


def table(found: Sequence[Mapping[str, Any]], predicted: Mapping[str, float], title: str) -> str:
    """Return what was found as text.

    Args:
        found: lines of ``contact.jsonl``.
        predicted: values by the names of results.
        title: the first line.
    """
    outcomes = [line for line in found if line.get("outcome", "done") != "done"]
    skipped = sum(line["outcome"] == "skipped" for line in outcomes)
    wrong = [_result(line, predicted) for line in found if line.get("good") is False]
    rest = [line for line in found if "result" in line and line.get("good") is not False and not line.get("detail")]
    told = [_result(line, predicted) for line in rest]
    done = sum(line.get("outcome") == "done" for line in found)
    heads = [title, f"{'what':<{_NAME}} {'measured':>{_VALUE}} {'predicted':>{_VALUE}}  unit, note"]
    left_out = f", {skipped} were skipped" if skipped else ""
    ends = [
        f"{done} processes ended well, {len(outcomes) - skipped} did not{left_out}; "
        f"{len(wrong)} results are not as they must be"
    ]
    room = MOST_LINES - len(heads) - len(ends)
    shown = [*map(_outcome, outcomes), *wrong, *told]
    if len(shown) > room:
        shown = [*shown[: room - 1], f"... and {len(shown) - room + 1} more in contact.jsonl"]
    return "\n".join(line[:_WIDTH].rstrip() for line in [*heads, *shown, *ends])


def _outcome(line: Mapping[str, Any]) -> str:
    return f"! {line['stage']}: {line['outcome']} after {line['seconds']:g} s  {line.get('note', '')}"


def _result(line: Mapping[str, Any], predicted: Mapping[str, float]) -> str:
    wanted = predicted.get(line["result"])
    mark = "! " if line.get("good") is False else ""
    name = f"{mark}{line['stage']}: {line['result']}"
    said = ", ".join(part for part in (line["unit"], line.get("note", "")) if part)
    beside = "" if wanted is None else number_text(wanted)
    return f"{name[:_NAME]:<{_NAME}} {number_text(line['value']):>{_VALUE}} {beside:>{_VALUE}}  {said}"


def number_text(value: object) -> str:
    """Return a number with four digits, and anything else as text."""
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else (
        f"{value:,.0f}" if isinstance(value, int | float) else str(value)
    )  # fmt: skip
