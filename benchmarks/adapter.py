"""The adapter beside Inflight's own code: decode and prefill of one Llama checkpoint with each of three steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence

from benchmarks.checkpoints import LARGE, TINY
from benchmarks.figures import bars, panels, streams_of
from benchmarks.peers.choice import in_turn
from benchmarks.peers.workers.inflight_engine import Model
from benchmarks.peers.workers.work import Cell, Meter, Others, random_prompts
from benchmarks.result import Result, Row
from benchmarks.setting import Setting

_NATIVE, _PYTORCH, _ADAPTER = "native step", "Inflight's PyTorch", "transformers' code"
_STEPS: Mapping[str, Mapping[str, str]] = {
    _NATIVE: {},
    _PYTORCH: {"cpu_step": "pytorch"},
    _ADAPTER: {"modeling": "transformers"},
}
"""What computes, and the settings of the engine."""
_LONG = Cell(1, 512, 2)
"""The prompt whose prefill is measured."""

Figures = Mapping[str, Mapping[str, float]]
"""Tokens per second, and the process's CPU milliseconds per token, of each load."""


def adapter_speed(setting: Setting, rounds: int) -> Result:
    """Measure each step in every round; each round begins with another."""
    shape, output = setting.pick(LARGE, TINY), setting.pick(32, 4)
    cells = [Cell(1, 128, output), Cell(8, 128, output), _LONG]
    steps = {name: Model(setting.engine(shape, 4096, **settings)) for name, settings in _STEPS.items()}
    others, found = Others(time.process_time, os.sched_getaffinity(0)), list[dict[str, Figures]]()
    for number in range(rounds):
        found.append({})
        for name in in_turn(list(steps), number):
            setting.say(f"adapter: round {number + 1} of {rounds}: {name}")
            found[-1][name] = _measured(steps[name], cells, number)
    return _result(found, f"a Llama of {shape.name} parameters in float32", others.share())


def _measured(step: Model, cells: Sequence[Cell], seed: int) -> Figures:
    found = {}
    for cell in cells:
        meter, prompts = Meter(cell), random_prompts(cell, seed)
        meter.begin()
        step.run(prompts, cell.output, meter)
        phase = "prefill" if cell is _LONG else "decode"
        load = f"{cell.prompt} tokens" if cell is _LONG else streams_of(cell.streams)
        figures = meter.figures()
        found[f"{phase}, {load}"] = {
            "tokens/s": figures[f"{phase}_tokens_per_s"],
            "CPU ms per token": figures[f"{phase}_cpu_ms_per_token"],
        }
    return found


def _result(rounds: Sequence[Mapping[str, Figures]], model: str, others: float) -> Result:
    rows = [_row(rounds, load, name) for load in rounds[0][_NATIVE] for name in _STEPS]
    loads = list(dict.fromkeys(str(row["load"]) for row in rows))
    shares = {load: _share(rounds, load, _ADAPTER) for load in loads}
    own = {load: _share(rounds, load, _ADAPTER, _PYTORCH) for load in loads}
    said = "; ".join(f"{load}: {share:.2f} ({own[load]:.2f})" for load, share in shares.items())
    finding = (
        f"The adapter's speed over that of the native step, and in brackets over that of Inflight's own code in "
        f"PyTorch, on {model}: {said}. Medians of the rounds' ratios, each of processors' time per token; "
        f"{len(rounds)} interleaved round{'s' * (len(rounds) > 1)}."
    )
    caveat = f"Others took {100 * others:.0f} % of the processors meanwhile, which wall clocks show."
    figure, panes = panels(2)
    for pane, phase in zip(panes, ("decode", "prefill"), strict=True):
        groups: dict[str, dict[str, float]] = {}
        for row in (one for one in rows if str(one["load"]).startswith(phase)):
            groups.setdefault(str(row["load"]), {})[str(row["step"])] = float(row["tokens/s"])
        bars(pane, groups, f"{phase}, tokens/s")
    return Result("adapter", "The adapter beside Inflight's own code", finding, rows, figure, caveat)


def _row(rounds: Sequence[Mapping[str, Figures]], load: str, name: str) -> Row:
    speeds = [one[name][load]["tokens/s"] for one in rounds]
    return {
        "load": load,
        "step": name,
        "tokens/s": round(statistics.median(speeds), 1),
        "lowest": round(min(speeds), 1),
        "highest": round(max(speeds), 1),
        "CPU ms per token": round(statistics.median(one[name][load]["CPU ms per token"] for one in rounds), 3),
        "share of the native step": round(_share(rounds, load, name), 2),
    }


def _share(rounds: Sequence[Mapping[str, Figures]], load: str, name: str, beside: str = _NATIVE) -> float:
    """Return the median over rounds of a step's speed beside another's, by the processors' time."""
    ratios = [one[beside][load]["CPU ms per token"] / one[name][load]["CPU ms per token"] for one in rounds]
    return statistics.median(ratios)
