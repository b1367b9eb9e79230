"""``make bench ARGS=peers``: Inflight beside OpenVINO GenAI, vLLM's CPU build and llama.cpp."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from benchmarks.peers.checkpoints import SHAPES, checkpoint
from benchmarks.peers.contenders import Place, cores
from benchmarks.peers.environments import home_of
from benchmarks.peers.jobs import WorkerFailure
from benchmarks.peers.measure import Run, figures_of
from benchmarks.peers.quality import Quality, SameModel
from benchmarks.peers.record import Record
from benchmarks.peers.report import results
from benchmarks.peers.variants import CLASSES, GRID, OURS, PACKED, PLAIN, SERVED, WORKERS, Part, Selection
from benchmarks.peers.workers.work import Cell
from benchmarks.result import Result
from inflight.report.failures import one_line_errors

_PARTS: tuple[Part, ...] = ("engine", "http")
_CONTEXTS = (128, 1024, 4096)
_NAMES = tuple(SHAPES)
_LONG_PROMPT = 1024
"""Of the one stream whose prefill is measured too."""
_PAGE = Page(
    "Peers beside us",
    "Inflight beside OpenVINO GenAI, vLLM's CPU build and llama.cpp, on one machine, the same checkpoints with "
    "random weights, as many threads for each as there are cores, and each contender at the best of its grid, or in "
    "the variants that a section's command names. "
    'Written by `make peers` and `make bench ARGS="peers --output FOLDER"`, with a folder for each kind of machine; '
    "[the documentation](../../benchmarks.md#peers) says how.",
    [
        f"{kind}-{shape}{'' if context == _CONTEXTS[0] else f'-context-{context}'}"
        for shape in _NAMES
        for context in _CONTEXTS
        for kind in ("ratios", "engine", "http")
    ],
)


def peers(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(_NAMES)}.")] = _NAMES[0],
    part: Annotated[list[str] | None, typer.Option(help="engine or http; by default what has such variants.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(WORKERS)}; all by default.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Any of {'; '.join(CLASSES)}; all by default.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Only this one of the grid; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in all; recorded ones count.")] = 5,
    times: Annotated[int, typer.Option(min=1, help="Measurements of a load in each process of an engine.")] = 3,
    context: Annotated[int, typer.Option(help="Tokens of the prompts that decode follows: 128, 1024 or 4096.")] = 128,
    streams: Annotated[list[int] | None, typer.Option(min=1, max=256, help="Streams at once; repeatable.")] = None,
    output_tokens: Annotated[int, typer.Option(min=4, max=1024, help="Tokens of each answer of the engines.")] = 32,
    long_prompt: Annotated[bool, typer.Option(help="Whether a prompt of 1,024 tokens is measured too.")] = True,
    under: Annotated[str, typer.Option(help="Run each measurement under a command, e.g. taskset -c 0-3.")] = "",
    timeout_s: Annotated[float, typer.Option(min=1, help="The longest that one measurement may take.")] = 1800,
    checkpoints: Annotated[Path, typer.Option(help="Where the checkpoints are, or are made.")] = FOLDER,
    output: Output = None,
) -> None:
    """Measure Inflight beside OpenVINO GenAI, vLLM and llama.cpp; `make peers` first makes their environments."""
    experts = SHAPES[shape].experts if shape in SHAPES else None
    classes = PACKED if experts and experts.packed else PLAIN
    choices = {"--shape": (shape, _NAMES), "--context": (context, _CONTEXTS)}
    choices |= {f"--part {one}": (one, _PARTS) for one in part or ()}
    choices |= {f"--contender {one}": (one, tuple(WORKERS)) for one in contender or ()}
    choices |= {f"--kind {one}": (one, classes) for one in kind or ()}
    choices |= {f"--variant {one}": (one, tuple(each.key for each in (*GRID, *SERVED))) for one in variant or ()}
    for option, (value, allowed) in choices.items():
        if value not in allowed:
            known = ", ".join(map(str, allowed))
            raise typer.BadParameter(f"{value!r} is not one of {known}", param_hint=option.partition(" ")[0])
    selection = Selection(contender or tuple(WORKERS), kind or classes, variant or ())
    parts = [one for one in _PARTS if (one in part if part else selection.variants(one))]
    measured = [selection.variants(one) for one in parts]
    if not measured or not all(measured):
        wanted = " or ".join(part or _PARTS)
        raise typer.BadParameter(f"these options leave no variant of {wanted}", param_hint="--variant")
    cells = _cells(streams or [1, 8, 32], context, output_tokens, long_prompt)
    with one_line_errors(console):
        place = Place(checkpoints / "peers", shlex.split(under), timeout_s)
        suffix = shape if context == _CONTEXTS[0] else f"{shape}-context-{context}"
        record = Record.open(place.folder / f"record-{suffix}.json", shape, cells, len(cores()))
        for one in WORKERS:
            if one != OURS and any(each.contender == one for found in measured for each in found):
                home_of(one)
        directory = checkpoint(SHAPES[shape], checkpoints)
    run = Run(place, record, directory, cells, selection, times, console.print)
    chosen = [f"--shape {shape} --context {context} --rounds {rounds}", *(f"--streams {one}" for one in streams or ())]
    chosen += [] if long_prompt else ["--no-long-prompt"]
    chosen += [f"--output-tokens {output_tokens} --times {times}", *(f"--contender {one}" for one in contender or ())]
    chosen += [*(f"--kind '{one}'" for one in kind or ()), *(f"--variant '{one}'" for one in variant or ())]
    command = command_line("peers", *chosen)
    for one in parts:
        report_results(partial(_measure, run, one, rounds, suffix), command, output, _PAGE)


def _cells(streams: Sequence[int], context: int, output: int, long_prompt: bool) -> list[Cell]:
    cells = [Cell(count, context, output) for count in streams]
    long = Cell(1, _LONG_PROMPT, output)
    return cells if long in cells or not long_prompt else [*cells, long]


def _measure(run: Run, part: Part, rounds: int, suffix: str) -> list[Result]:
    run.measure(part, rounds)
    if part == "engine":
        _measure_quality(run)
    return results(run.record, part, rounds, run.cells, suffix)


def _measure_quality(run: Run) -> None:
    """Measure the KL divergence of every variant that could be measured and has none yet."""
    quality, known = _quality_of(run), run.record.content["kl"]
    measured = {key for found in (run.record.grid, *run.record.content["engine"]) for key in figures_of(found)}
    for variant in (one for one in GRID if one.key in measured and one.key not in known):
        run.say(f"KL: {variant.key}")
        try:
            known[variant.key] = float(f"{quality.loss(variant):.3g}")
        except WorkerFailure as failure:
            run.say(f"    {failure}")
        run.record.save()


def _quality_of(run: Run) -> Quality:
    if SHAPES[run.record.content["shape"]].experts is None:
        return Quality(run.place)
    ours = next(one for one in GRID if one.contender == OURS and one.kind == run.selection.kinds[0])
    return SameModel(run.place, run.checkpoint, ours)
