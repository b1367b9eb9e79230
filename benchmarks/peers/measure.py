"""The order of the measurements: the grid once, then rounds of the best, each round beginning with another variant.

Every measurement is a program of its own that loads, warms up, measures and ends, so that none shares the machine with
another's threads or memory. What the record has already is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.choice import chosen, in_turn
from benchmarks.peers.contenders import Place, cores
from benchmarks.peers.jobs import WorkerFailure
from benchmarks.peers.record import Part, Record
from benchmarks.peers.serving import serve_job
from benchmarks.peers.variants import GRID, SERVED, Variant
from benchmarks.peers.workers.work import Cell
from inflight.report.table import print_table

PHASES = ("decode", "prefill")


@dataclass(frozen=True)
class Run:
    """One run of the command."""

    place: Place
    record: Record
    checkpoint: Path
    cells: Sequence[Cell]
    contenders: Sequence[str]
    """Those to measure."""
    kinds: Sequence[str]
    """The classes to measure."""
    say: Callable[[str], object]

    def measure(self, part: Part, rounds: int) -> None:
        """Measure the grid, choose, and measure the chosen until there are so many rounds.

        Raises:
            InflightError: a chosen variant failed, or a peer's environment has not been made.
        """
        every = GRID if part == "engine" else SERVED
        variants = [one for one in every if one.contender in self.contenders and one.kind in self.kinds]
        self._measure_grid(part, variants)
        best = chosen(variants, figures_of(self.record.grid(part)), figure_names(part, self.cells))
        self.say(f"the best of the grid, of which there are {rounds} rounds: {', '.join(one.key for one in best)}")
        for number, done in enumerate(self.record.rounds(part, rounds)[:rounds]):
            for variant in in_turn(best, number):
                if variant.key not in done:
                    self.say(f"round {number + 1} of {rounds}: {variant.key}")
                    self.record.put(done, variant.key, self._once(part, variant, number + 1))

    def _measure_grid(self, part: Part, variants: Iterable[Variant]) -> None:
        grid = self.record.grid(part)
        for variant in variants:
            if variant.key in grid:
                continue
            self.say(f"grid: {variant.key}")
            try:
                if "failed" in (alone := self.record.grid("engine").get(variant.key, {})):
                    raise WorkerFailure(f"its engine alone could not be measured: {alone['failed']}")
                found = self._once(part, variant, 0)
            except WorkerFailure as failure:
                self.say(f"    {failure}")
                found = {"failed": str(failure)}
            self.record.put(grid, variant.key, found)
        print_table("The grid", [row for key, one in grid.items() if (row := _grid_row(key, one))])

    def _once(self, part: Part, variant: Variant, seed: int) -> dict[str, Any]:
        model = self.place.converted(variant, self.checkpoint)
        if part == "http":
            return serve_job(self.place, variant, model, seed)
        worker = self.place.worker(variant.contender, measures=True)
        job = {"action": "speed", "model": str(model.resolve()), "settings": dict(variant.settings), "seed": seed}
        cells = [asdict(cell) for cell in self.cells]
        result = worker.do(job | {"threads": len(cores()), "cells": cells}, self.place.timeout_s)
        return measured_of(self.cells, result)


def measured_of(cells: Sequence[Cell], result: Mapping[str, Any]) -> dict[str, Any]:
    """Return a worker's result with a figure's name for each number."""
    figures, cpu = {}, {}
    for cell, found in zip(cells, result["cells"], strict=True):
        for phase in PHASES:
            figures[figure_name(phase, cell)] = round(found[f"{phase}_tokens_per_s"], 2)
            cpu[figure_name(phase, cell)] = round(found[f"{phase}_cpu_ms_per_token"], 4)
    return {"figures": figures, "cpu_ms_per_token": cpu, "versions": result["versions"]}


def figure_name(phase: str, cell: Cell) -> str:
    """Return the name of a cell's speed in one phase."""
    return f"{phase}, {cell.streams} x {cell.prompt}"


def figure_names(part: Part, cells: Sequence[Cell]) -> list[str]:
    """Return the names of the speeds that variants are compared in."""
    if part == "engine":
        return [figure_name(phase, cell) for phase in PHASES for cell in cells]
    from benchmarks.peers.serving import STREAMS, speed_name

    return [speed_name(streams) for streams in STREAMS]


def figures_of(measured: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the figures of each variant that did not fail."""
    return {key: one["figures"] for key, one in measured.items() if "figures" in one}


def _grid_row(key: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    return {"tokens/s": key, **measured["figures"]} if "figures" in measured else {}
