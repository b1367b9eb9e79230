"""How long an engine takes to start, by its own count, phase by phase."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.figures import panels, stacks
from benchmarks.result import Result, Row

Start = Mapping[str, float]
"""Seconds by phase."""


def start(starts: Mapping[tuple[str, str], Sequence[Start]]) -> Result:
    """Return the median start of each model and engine.

    Args:
        starts: by the model's and the engine's name.
    """
    rows: list[Row] = []
    heights: dict[str, dict[str, float]] = {}
    for (model, engine), seen in starts.items():
        spent = {phase: statistics.median(one[phase] for one in seen) for phase in seen[0]}
        whole = statistics.median(sum(one.values()) for one in seen)
        seconds = {f"{phase}, s": round(value, 3) for phase, value in spent.items()}
        rows.append({"model": model, "engine": engine, "starts": len(seen), "all, s": round(whole, 3), **seconds})
        heights[f"{model}\n{engine.rpartition(', ')[2]}"] = spent
    slowest = max(rows, key=lambda row: float(row["all, s"]))
    finding = (
        "From a checkpoint to an engine that has made its first tokens, Python's imports not counted; the median of "
        "the starts of these runs, by the phases of `inflight_startup_seconds`. Files that were read before come from "
        "the system's memory. "
        f"The slowest is {slowest['model']} in {str(slowest['engine']).rpartition(', ')[2]} with {slowest['all, s']} s."
    )
    figure, [axes] = panels(1)
    stacks(axes, heights, "start, s")
    return Result("start", "The start of an engine", finding, rows, figure)
