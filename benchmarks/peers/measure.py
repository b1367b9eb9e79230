"""The order of the measurements: the grid once, then rounds of the best, each round beginning with another variant.

Every measurement is a program of its own that loads, warms up, measures and ends, so that none shares the machine with
another's threads or memory. What the record has already is not measured again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.choice import chosen, in_turn
from benchmarks.peers.contenders import Place, cores
from benchmarks.peers.jobs import WorkerFailure
from benchmarks.peers.record import Record
from benchmarks.peers.serving import STREAMS, serve_job, speed_name
from benchmarks.peers.variants import Part, Selection, Variant
from benchmarks.peers.workers.work import Cell
from inflight.report.table import print_table

PHASES = ("decode", "prefill")
_GRID_SEED = 0
"""Of the grid's prompts; a round's seed is its number, from 1 on."""
MOST_OTHERS, _TRIES = 0.05, 4
"""The part of the processors' time that others may take beside a measurement, and how often it is tried."""


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    place: Place
    record: Record
    checkpoint: Path
    cells: Sequence[Cell]
    selection: Selection
    """Of the variants to measure."""
    times: int
    """Measurements of a load in one process of an engine; the median counts."""
    say: Callable[[str], object]

    def measure(self, part: Part, rounds: int) -> None:
        """Measure the grid, choose, and measure the chosen until there are so many rounds.

        Raises:
            InflightError: a chosen variant failed, or a peer's environment has not been made.
        """
        variants = self.selection.variants(part)
        best = self._best_engines(variants) if part == "engine" else self._that_can_run(variants)
        self.say(f"{rounds} rounds of: {', '.join(one.key for one in best)}")
        for number, done in enumerate(self.record.rounds(part, rounds)[:rounds]):
            for variant in in_turn(best, number):
                if variant.key not in done:
                    self.say(f"round {number + 1} of {rounds}: {variant.key}")
                    self.record.put(done, variant.key, self._quietly(part, variant, number + 1))

    def _best_engines(self, variants: Sequence[Variant]) -> list[Variant]:
        """Measure the grid once, print it, and return what is a contender's best in some figure.

        A variant that was asked for by its key, with no other of its contender and class, is the best unmeasured.
        """
        grid, groups = self.record.grid, Counter((one.contender, one.kind) for one in variants)
        lone = [one for one in variants if self.selection.names and groups[one.contender, one.kind] == 1]
        compared = [one for one in variants if one not in lone]
        for variant in (one for one in compared if one.key not in grid):
            self.say(f"grid: {variant.key}")
            try:
                found = self._quietly("engine", variant, _GRID_SEED)
            except WorkerFailure as failure:
                self.say(f"    {failure}")
                found = {"failed": str(failure)}
            self.record.put(grid, variant.key, found)
        measured = figures_of(grid)
        if measured:
            print_table("The grid", [{"tokens/s": key, **found} for key, found in measured.items()])
        kept = [*lone, *chosen(compared, measured, figure_names("engine", self.cells))]
        return [one for one in variants if one in kept and "failed" not in grid.get(one.key, {})]

    def _that_can_run(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return the servers without those whose engine alone failed in the grid; there are few, and no other grid."""
        return [one for one in variants if "failed" not in self.record.grid.get(one.key, {})]

    def _quietly(self, part: Part, variant: Variant, seed: int) -> dict[str, Any]:
        """Measure, again while others take too much of the processors; return the least disturbed."""
        tries: list[dict[str, Any]] = []
        while len(tries) < _TRIES and (not tries or tries[-1]["others"] > MOST_OTHERS):
            tries.append(self._once(part, variant, seed))
            if (others := tries[-1]["others"]) > MOST_OTHERS:
                self.say(f"    others took {others:.0%} of the processors meanwhile")
        return min(tries, key=lambda one: float(one["others"]))

    def _once(self, part: Part, variant: Variant, seed: int) -> dict[str, Any]:
        model = self.place.converted(variant, self.checkpoint)
        if part == "http":
            return serve_job(self.place, variant, model, seed)
        worker = self.place.worker(variant.contender, measures=True)
        job = {"action": "speed", "model": str(model.resolve()), "settings": dict(variant.settings), "seed": seed}
        times = 1 if seed == _GRID_SEED else self.times  # the grid only chooses
        asked = {"threads": len(cores()), "times": times, "cells": [asdict(cell) for cell in self.cells]}
        result = worker.do(job | asked, self.place.timeout_s)
        return measured_of(self.cells, result) | {"times": times}


def measured_of(cells: Sequence[Cell], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's result with a figure's name for each number."""
    figures, cpu = {}, {}
    for cell, found in zip(cells, result["cells"], strict=True):
        for phase in PHASES:
            figures[figure_name(phase, cell)] = round(found[f"{phase}_tokens_per_s"], 2)
            cpu[figure_name(phase, cell)] = round(found[f"{phase}_cpu_ms_per_token"], 4)
    return {
        "figures": figures,
        "cpu_ms_per_token": cpu,
        "versions": result["versions"],
        "others": round(result["others"], 4),
    }


def figure_name(phase: str, cell: Cell) -> str:
    """Return the name of a cell's speed in one phase."""
    return f"{phase}, {cell.streams} x {cell.prompt}"


def figure_names(part: Part, cells: Sequence[Cell]) -> list[str]:
    """Return the names of the speeds that variants are compared in."""
    if part == "engine":
        return [figure_name(phase, cell) for phase in PHASES for cell in cells]
    return [speed_name(streams) for streams in STREAMS]


def figures_of(measured: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of each variant that did not fail."""
    return {key: one["figures"] for key, one in measured.items() if "figures" in one}
