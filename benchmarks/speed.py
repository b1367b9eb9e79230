"""How fast the engine is beside transformers, in each type that both can compute in, and where its steps' time goes.

They run one after the other, round after round, each round beginning with another, so that in six rounds each of the
six has come first once; the machine's own ups and downs are slower than a round, so that each round gives a ratio, and
their median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure

from benchmarks.checkpoints import Shape
from benchmarks.drive import prompts
from benchmarks.figures import bars, panels
from benchmarks.medians import median_interval
from benchmarks.quantized import quantized_checkpoint
from benchmarks.result import Result, Row
from benchmarks.roofline import flops_per_token, peak_flops
from benchmarks.setting import BLOCK_SIZE, Setting
from benchmarks.start import Start, start
from benchmarks.step import TOKENS_PER_STEP, Steps, phases, profile
from benchmarks.transformers_peers import ContinuousPeer, EnginePeer, GeneratePeer, Peer, Rates, load_transformers
from inflight.report.plots import GREY, INK

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
ENGINES = ("engine, float32", "engine, bfloat16", "engine, INT8")
TRANSFORMERS = ("generate, float32", "generate, bfloat16", "continuous batching, float32")
PEERS = (*ENGINES, *TRANSFORMERS)
ALIKE = {
    "float32 / generate": (ENGINES[0], TRANSFORMERS[0]),
    "bfloat16 / generate": (ENGINES[1], TRANSFORMERS[1]),
    "float32 / continuous batching": (ENGINES[0], TRANSFORMERS[2]),
}
"""The engine beside transformers in the same type."""
FASTEST = "fastest / fastest"
COMPARISONS = (*ALIKE, FASTEST)
_LEGEND = {
    "float32 / generate": "both in float32, beside generate",
    "bfloat16 / generate": "both in bfloat16, beside generate",
    "float32 / continuous batching": "both in float32, beside continuous batching",
    FASTEST: "the fastest on either side",
}
"""What each comparison is called in the picture."""
_GOAL = 2.0
"""Times transformers, which the engine is meant to reach at many streams."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of each stream, in tokens."""

    prompt: int
    output: int


@dataclass(frozen=True)
class _Cell:
    """One shape with one number of streams."""

    shape: Shape
    streams: int
    rates: Mapping[str, Sequence[Rates]]
    """The rates of each round, by peer."""
    peak: float
    """FLOP/s of the machine, in float32."""
    steps: Steps
    starts: Mapping[str, Start]
    """The starts, by engine."""

    def median(self, name: str, phase: Phase) -> float:
        """Return a peer's median rate."""
        return statistics.median(getattr(one, phase) for one in self.rates[name])

    def fastest(self, names: Sequence[str], phase: Phase) -> str:
        """Return the peer of ``names`` with the highest rate."""
        return max(names, key=lambda name: self.median(name, phase))

    def pair(self, comparison: str, phase: Phase) -> tuple[str, str]:
        """Return the engine and what of transformers a comparison is about."""
        if comparison == FASTEST:
            return self.fastest(ENGINES, phase), self.fastest(TRANSFORMERS, phase)
        return ALIKE[comparison]

    def ratios(self, comparison: str, phase: Phase) -> list[float]:
        """Return the one's rate over the other's, of each round."""
        ours, theirs = (self.rates[name] for name in self.pair(comparison, phase))
        return [getattr(one, phase) / getattr(other, phase) for one, other in zip(ours, theirs, strict=True)]

    def ratio(self, comparison: str, phase: Phase) -> float:
        """Return the median of ``ratios``."""
        return statistics.median(self.ratios(comparison, phase))


def measure_speed(
    setting: Setting, shapes: Sequence[Shape], streams: Sequence[int], lengths: Lengths, rounds: int
) -> list[Result]:
    """Measure each shape with each number of streams.

    Returns:
        Speed beside transformers, the parts of a step, the phases of a step that decodes, and the engines' starts.

    Raises:
        InflightError: a checkpoint cannot be made, or one of those that are measured failed.
    """
    cells = [_measure(setting, shape, count, lengths, rounds) for shape in shapes for count in streams]
    steps = [cell.steps for cell in cells]
    starts = {
        (shape.name, name): [cell.starts[name] for cell in cells if cell.shape is shape]
        for shape in shapes
        for name in ENGINES
    }
    return [_speed(cells, lengths, rounds), profile(steps), phases(steps), start(starts)]


def _measure(setting: Setting, shape: Shape, streams: int, lengths: Lengths, rounds: int) -> _Cell:
    generator = np.random.default_rng(0)
    checkpoint = setting.checkpoint(shape)
    quantized = quantized_checkpoint(setting.folder, checkpoint, checkpoint.name, "int8")
    with ExitStack() as stack:
        peers = _peers(setting, checkpoint, quantized, streams, lengths.prompt + lengths.output)
        rates: dict[str, list[Rates]] = {name: [] for name in PEERS}
        for peer in peers.values():
            stack.callback(peer.close)
            peer.run(prompts(generator, streams, lengths.prompt), 2)
        engines = {name: peer.engine for name, peer in peers.items() if isinstance(peer, EnginePeer)}
        stats = engines[ENGINES[0]].stats
        before = dict(stats.step_part), stats.steps
        for number in range(rounds):
            setting.say(f"{shape.name}, {streams} streams, round {number + 1} of {rounds}")
            given, first = prompts(generator, streams, lengths.prompt), number % len(PEERS)
            for name in PEERS[first:] + PEERS[:first]:
                rates[name].append(peers[name].run(given, lengths.output))
        spent = {part: 1000 * (total - before[0][part]) for part, total in stats.step_part.items()}
        peak = peak_flops(setting.device)
    parts = {part: total / (stats.steps - before[1]) for part, total in spent.items()}
    starts = {name: dict(engine.stats.start_phases) for name, engine in engines.items()}
    del peers, peer, engines, stats  # what follows loads an engine of its own
    steps = Steps.take(setting, shape, streams, lengths.prompt, parts)
    return _Cell(shape, streams, rates, peak, steps, starts)


def _peers(setting: Setting, checkpoint: Path, quantized: Path, streams: int, longest: int) -> dict[str, Peer]:
    """Return all that are measured, by the names of ``PEERS``."""
    budget = max(TOKENS_PER_STEP, streams)
    capacity = streams * -(-longest // BLOCK_SIZE) * BLOCK_SIZE
    kinds = ((checkpoint, "float32"), (checkpoint, "bfloat16"), (quantized, "float32"))
    # On a CPU a cache in float32 is what attention reads without copies, whatever the model computes in.
    cache = "float32" if setting.device == "cpu" else "auto"
    limits: dict[str, Any] = {"max_batch_size": streams, "max_tokens_per_step": budget, "kv_cache_dtype": cache}
    ours: list[Peer] = [EnginePeer(setting.engine(model, capacity, dtype=dtype, **limits)) for model, dtype in kinds]
    wide, narrow = (load_transformers(checkpoint, setting.device, one) for one in (torch.float32, torch.bfloat16))
    theirs: list[Peer] = [GeneratePeer(wide), GeneratePeer(narrow), ContinuousPeer(wide, streams, longest, budget)]
    return dict(zip(PEERS, [*ours, *theirs], strict=True))


def _speed(cells: Sequence[_Cell], lengths: Lengths, rounds: int) -> Result:
    rows = [_row(cell, phase) for cell in cells for phase in PHASES]
    most = max(cell.streams for cell in cells)
    chosen = [(cell, phase) for cell in cells if cell.streams == most for phase in PHASES]
    finding = (
        f"Tokens per second, prompts of {lengths.prompt} and outputs of {lengths.output} tokens, greedy; medians of "
        f"{rounds} rounds; the ratios with 95 % intervals. At {most} streams: "
        f"{'; '.join(_told(cell, phase) for cell, phase in chosen)}. {_goal(chosen)} {_roof(chosen, lengths)} Equal "
        "prompts whose outputs end together are generate's best case: what batching in flight is worth where lengths "
        "differ is among the headlines."
    )
    return Result("speed", "Speed beside transformers", finding, rows, picture(rows))


def picture(rows: Sequence[Row]) -> Figure:
    """Return how many times as fast as transformers the engine is: a panel for each phase, from the result's rows."""
    figure, axes = panels(len(PHASES))
    figure.set_figheight(4.4)
    for one, phase in zip(axes, PHASES, strict=True):
        one.set_title(phase)
        one.axhline(1, color=INK, linewidth=1, label="as fast as transformers")
        one.axhline(_GOAL, color=GREY, linestyle="--", linewidth=1, label=f"the goal, {_GOAL:g} times")
        groups = {
            f"{row['model']}\n{row['streams']}": {
                text: float(str(row[name]).split()[0]) for name, text in _LEGEND.items()
            }
            for row in rows
            if row["phase"] == phase
        }
        bars(one, groups, "times transformers' speed")
        one.set_xlabel("model and number of streams")
        if (own := one.get_legend()) is not None:  # the figure has one for both
            own.remove()
    drawn, names = axes[0].get_legend_handles_labels()
    figure.legend(drawn, names, loc="outside lower left", ncols=3)
    return figure


def _told(cell: _Cell, phase: Phase) -> str:
    ours, theirs = (name.replace(",", " in") for name in cell.pair(FASTEST, phase))
    alike = [f"{cell.ratio(name, phase):.2f} times {of[1].replace(',', ' in')}" for name, of in ALIKE.items()]
    return (
        f"{cell.shape.name} in {phase} {', '.join(alike)}, each with the engine in the same type, and with the "
        f"fastest on both sides {cell.ratio(FASTEST, phase):.2f} times ({ours}, {theirs})"
    )


def _goal(chosen: Sequence[tuple[_Cell, Phase]]) -> str:
    """Return where the engine is ahead, and where twice as fast."""
    ratios = {
        f"{name} ({cell.shape.name}, {phase})": cell.ratio(name, phase)
        for name in COMPARISONS
        for cell, phase in chosen
    }
    ahead = sum(ratio > 1 for ratio in ratios.values())
    reached = [name for name, ratio in ratios.items() if ratio >= _GOAL]
    return f"Above 1 are {ahead} of these {len(ratios)} ratios; at least {_GOAL:g}: {', '.join(reached) or 'none'}."


def _roof(chosen: Sequence[tuple[_Cell, Phase]], lengths: Lengths) -> str:
    """Return what the weights' products take of the engine's time in float32, and what that leaves to be won."""
    peak = max(cell.peak for cell, _ in chosen)
    parts = []
    for cell, phase in chosen:
        roof = peak / flops_per_token(cell.shape, 1 if phase == "decode" else 1 / lengths.prompt)
        share, most = cell.median(ENGINES[0], phase) / roof, roof / cell.median(TRANSFORMERS[0], phase)
        parts.append(f"{100 * share:.0f} % in {phase} with {cell.shape.name} ({most:.2f})")
    return (
        f"In float32 a large product of matrices reaches {peak / 1e9:.0f} GFLOP/s here. At that speed the products "
        f"with the weights alone take, of the engine's time, {', '.join(parts)}; in brackets, how many times as fast "
        "as generate an engine in float32 could be that did nothing else."
    )


def _row(cell: _Cell, phase: Phase) -> Row:
    row: dict[str, float | str] = {"model": cell.shape.name, "streams": cell.streams, "phase": phase}
    row |= {f"{name}, tokens/s": round(cell.median(name, phase), 1) for name in PEERS}
    for name in COMPARISONS:
        low, high = median_interval(cell.ratios(name, phase))
        row[name] = f"{cell.ratio(name, phase):.2f} ({low:.2f} to {high:.2f})"
    return row
