"""What is made of the phases of native steps: a table, a picture and what they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.checkpoints import Shape
from benchmarks.figures import panels, stacks
from benchmarks.native.bounds import PHASES, Types
from benchmarks.native.phases import REST, PhaseTimes
from benchmarks.result import Result, Row

_WORDS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "INT8"}
_CAVEAT = (
    "Bytes are those of packed weights and of keys and values; rows of activations, which stay in the caches, are not "
    "counted. A phase is faster than its bytes allow where the last cache still has weights of the step before."
)


def phases_result(
    name: str, shape: Shape, types: Types, machine: str, rounds: int, times: Sequence[PhaseTimes]
) -> Result:
    """Return the phases beside their bounds.

    Args:
        name: of the result's files.
        shape, types: of the model.
        machine: the instruction set and the threads, in words.
        rounds: of which the figures are medians.
        times: one of each load.
    """
    whole = [f"{one.load.name}: {1e3 * one.whole:.1f} ms, {_percent(one.bound, one.whole)} %" for one in times]
    finding = (
        f"Steps of the native library with {machine}, weights in {_WORDS[types.weights]} and a KV cache in "
        f"{_WORDS[types.cache]}, called directly; medians of {rounds} rounds. The bound of a phase is the longer of "
        "two times: its bytes at the bandwidth of a stream of reads, and its multiply-adds at the peak of the kernels' "
        "own instructions; both are measured before and after the steps of each round. Steps, and the share of the "
        f"time that their bounds add up to: {'; '.join(whole)}. {_largest_gaps(times)}"
    )
    title = f"Phases of a native step, {shape.name}, weights in {_WORDS[types.weights]}"
    usual = "float32" if types.weights == "float32" else "bfloat16"
    title += f", KV cache in {_WORDS[types.cache]}" if types.cache != usual else ""
    contexts = [one.load.start for one in times if one.load.start]
    title += f", behind {contexts[0]:,} tokens" if contexts else ""
    return Result(name, title, finding, [row for one in times for row in _rows(one)], _picture(times), _CAVEAT)


def _percent(part: float, whole: float) -> int:
    return round(100 * part / whole)


def _largest_gaps(times: Sequence[PhaseTimes]) -> str:
    """Return which phase is furthest above its bound, for each load."""
    told = []
    for one in times:
        gaps = {name: one.seconds[name] - bound.seconds for name, bound in one.bounds.items()} | {
            REST: one.seconds[REST]
        }
        name = max(gaps, key=lambda phase: gaps[phase])
        told.append(f"{name} in {one.load.name} ({1e3 * gaps[name]:.1f} ms)")
    return f"The most time above a bound has {'; '.join(told)}."


def _rows(one: PhaseTimes) -> list[Row]:
    rows: list[Row] = []
    for name in (*PHASES, REST):
        row: dict[str, float | str] = {"step": one.load.name, "phase": name, "ms": round(1e3 * one.seconds[name], 3)}
        row |= _bounded(one, name) if name in one.bounds else dict.fromkeys(_COLUMNS, "")
        rows.append(row)
    whole: dict[str, float | str] = {"step": one.load.name, "phase": "all", "ms": round(1e3 * one.whole, 3)}
    whole |= dict.fromkeys(_COLUMNS, "")
    whole |= {"bound, ms": round(1e3 * one.bound, 3), "reached, %": _percent(one.bound, one.whole)}
    return [*rows, whole]


_COLUMNS = ("MB", "M multiply-adds", "bytes, ms", "arithmetic, ms", "bound, ms", "bound by", "reached, %")


def _bounded(one: PhaseTimes, name: str) -> Mapping[str, float | str]:
    work, bound = one.work[name], one.bounds[name]
    values = (
        round(work.bytes / 1e6, 2),
        round(work.products / 1e6, 1),
        round(1e3 * bound.by_bytes, 3),
        round(1e3 * bound.by_products, 3),
        round(1e3 * bound.seconds, 3),
        bound.binding,
        _percent(bound.seconds, one.seconds[name]),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _picture(times: Sequence[PhaseTimes]) -> Figure:
    """Return two bars for each load: the phases of its step, and their bounds, as shares of the step."""
    groups: dict[str, dict[str, float]] = {}
    for one in times:
        load = one.load.name.replace(", ", "\n")
        measured = {name: 100 * one.seconds[name] / one.whole for name in (*PHASES, REST)}
        bounds = {name: 100 * bound.seconds / one.whole for name, bound in one.bounds.items()}
        groups |= {f"{load}\nstep": measured, f"{load}\nbounds": bounds | {REST: 0.0}}
    figure, [axes] = panels(1)
    figure.set_figheight(4.2)
    stacks(axes, groups, "share of the step, %")
    axes.tick_params(axis="x", labelsize=8)
    return figure
