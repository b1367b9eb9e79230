"""``make bench ARGS=native``: the phases of the native step beside their bounds, and what each change brought."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from benchmarks.checkpoints import SHAPES as SMALL_SHAPES
from benchmarks.checkpoints import Shape
from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from benchmarks.native.bounds import Load, Types
from benchmarks.native.changes import Change, changes_result, commit_changes, measure_changes, option_changes
from benchmarks.native.probe import NUMBERS, Number, Probe
from benchmarks.peers.checkpoints import SHAPES as LARGE_SHAPES
from benchmarks.peers.checkpoints import checkpoint
from benchmarks.peers.measure import figure_name
from benchmarks.peers.workers.work import Cell
from benchmarks.result import Result
from inflight.engine.native.bindings import NativeError, instruction_sets
from inflight.errors import InflightError
from inflight.report.failures import one_line_errors
from inflight.settings.threads import cpu_threads

if TYPE_CHECKING:  # PyTorch is loaded by what needs it, and not by the other commands
    from benchmarks.native.phases import Sampling

SHAPES = SMALL_SHAPES | {name: shape for name, shape in LARGE_SHAPES.items() if shape.experts is None}
"""Those whose bounds are known: what a step reads of experts depends on what its tokens choose."""
_CONTEXTS, _PARTS = (128, 1024, 4096), ("phases", "options")
_OUTPUT_TOKENS = 32
"""Of each answer, where engines are compared."""


def _of_cache(cache: str | None) -> str:
    return f"-kv-{cache}" if cache else ""


def _of_context(context: int) -> str:
    return "" if context == _CONTEXTS[0] else f"-context-{context}"


_PAGE = Page(
    "The native step",
    "Where the time of a step of the CPU's native kernels goes, beside what the machine could do; then what options "
    'and commits bring, where they were measured. Written by `make bench ARGS="native --output FOLDER"`, with a folder '
    "for each kind of machine; [the documentation](../../benchmarks.md#native) says how.",
    [
        *(
            f"phases-{shape}-{weights}{_of_cache(cache)}{_of_context(context)}"
            for shape in SHAPES
            for context in _CONTEXTS
            for weights in NUMBERS
            for cache in (None, *NUMBERS)
        ),
        *(f"{kind}-{shape}" for kind in ("options", "commits") for shape in SHAPES),
    ],
)


@dataclass(frozen=True)
class _Run:
    """What the options say."""

    shape: Shape
    context: int
    streams: Sequence[int]
    prefill: int
    rounds: int
    instruction_sets: Sequence[str]
    """The one to measure, and those behind it in ``instruction_sets()``."""
    threads: int
    under: Sequence[str]
    folder: Path
    """Of checkpoints."""
    cache: Number | None = None
    """The type of the KV cache; None: bfloat16, and float32 beside weights in float32."""

    def phases(self, weights: Number, sampling: Sampling) -> Result:
        """Measure the phases of the steps of all loads."""
        from benchmarks.native.phases import NativeSteps, cache_tokens
        from benchmarks.native.report import phases_result

        usual: Number = "float32" if weights == "float32" else "bfloat16"
        types = Types(weights, self.cache or usual)
        loads = [*(Load(count, self.context, 1) for count in self.streams), Load(1, 0, self.prefill)]
        best, many = self.instruction_sets[0], "s" * (self.threads > 1)
        probe = Probe(best, self.threads, self.folder / "native")
        console.print(f"{self.shape.name}, weights in {weights}: packing")
        steps = NativeSteps(self.shape, types, best, self.threads, cache_tokens(loads))
        times = []
        for load in loads:
            console.print(f"{self.shape.name}, weights in {weights}: {load.name}")
            times.append(steps.measure(load, probe, sampling))
        suffix = _of_cache(self.cache) + _of_context(self.context)
        machine = f"kernels for {best} and {self.threads} thread{many}"
        return phases_result(
            f"phases-{self.shape.name}-{weights}{suffix}", self.shape, types, machine, self.rounds, times
        )

    def changes(self, name: str, title: str, lead: str, find: Callable[[Path], Sequence[Change]]) -> Result:
        """Measure what changes brought; ``find`` returns them, and gets a folder for what they need."""
        folder = self.folder / "native"
        changes = find(folder)
        directory = checkpoint(self.shape, self.folder)
        cells = [Cell(count, self.context, _OUTPUT_TOKENS) for count in self.streams]
        long = Cell(1, self.prefill, _OUTPUT_TOKENS)
        figures = [*(figure_name("decode", cell) for cell in cells), figure_name("prefill", long)]
        found = measure_changes(changes, directory, [*cells, long], self.rounds, folder, self.under, console.print)
        return changes_result(f"{name}-{self.shape.name}", f"{title}, {self.shape.name}", lead, changes, figures, found)


def native(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "125M",
    weights: Annotated[list[str] | None, typer.Option(help=f"{', '.join(NUMBERS)}; all by default.")] = None,
    part: Annotated[list[str] | None, typer.Option(help="phases or options; both by default.")] = None,
    commit: Annotated[
        list[str] | None, typer.Option(help="Compare these commits and this checkout, each with the one before.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens that decode has behind it: 128, 1024 or 4096.")] = 128,
    streams: Annotated[list[int] | None, typer.Option(min=1, max=256, help="Streams at once; repeatable.")] = None,
    prefill: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of the prompt that is computed.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="How often all is measured.")] = 5,
    instruction_set: Annotated[str | None, typer.Option(help="The best that the processor has by default.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; what the engine would choose.")] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help=f"{', '.join(NUMBERS)}, of the phases; bfloat16, or float32 with such weights.")
    ] = None,
    under: Annotated[str, typer.Option(help="Run each engine of the comparisons under a command.")] = "",
    checkpoints: Annotated[Path, typer.Option(help="Where checkpoints are, or are made.")] = FOLDER,
    output: Output = None,
) -> None:
    """Measure the native step's phases beside the machine's own limits, and what options or commits bring."""
    _check(model, weights or (), part or (), context, kv_cache)
    with one_line_errors(console):
        sets = _instruction_sets(instruction_set)
    run = _Run(
        SHAPES[model], context, streams or [1, 8, 32], prefill, rounds, sets, threads or cpu_threads(native=True),
        shlex.split(under), checkpoints, cast("Number | None", kv_cache),
    )  # fmt: skip
    words = [f"native --model {model}", f"--context {context}", *(f"--streams {one}" for one in streams or ())]
    words += [f"--prefill {prefill} --rounds {rounds}", *([f"--instruction-set {sets[0]}"] if instruction_set else [])]
    words += [f"--threads {threads}"] if threads else []
    words += [f"--kv-cache {kv_cache}"] if kv_cache else []
    if part and commit:
        raise typer.BadParameter("it cannot be given beside --commit", param_hint="--part")
    for option, given in (("--weights", weights), ("--kv-cache", kv_cache)):
        if given and (commit or "phases" not in (part or _PARTS)):
            raise typer.BadParameter("it is of the phases, which are not measured", param_hint=option)
    if commit:
        command = command_line(*words, *(f"--commit {one}" for one in commit))
        report_results(lambda: [_commits(run, commit)], command, output, _PAGE)
        return
    parts = part or _PARTS
    if "phases" in parts:
        for number in NUMBERS:
            if number in (weights or NUMBERS):
                command = command_line(*words, f"--part phases --weights {number}")
                report_results(lambda number=number: [_phases(run, number)], command, output, _PAGE)  # type: ignore[misc]
    if "options" in parts:
        report_results(lambda: [_options(run)], command_line(*words, "--part options"), output, _PAGE)


def _check(model: str, weights: Sequence[str], parts: Sequence[str], context: int, cache: str | None) -> None:
    """
    Raises:
        typer.BadParameter: an option has no such value.
    """
    choices = [("--model", model, tuple(SHAPES)), ("--context", context, _CONTEXTS)]
    choices += [("--weights", one, get_args(Number)) for one in weights]
    choices += [("--kv-cache", cache, get_args(Number))] if cache else []
    choices += [("--part", one, _PARTS) for one in parts]
    for option, value, allowed in choices:
        if value not in allowed:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(str, allowed))}", param_hint=option)


def _instruction_sets(wanted: str | None) -> list[str]:
    """Return the instruction set to measure, and those behind it in ``instruction_sets()``.

    Raises:
        InflightError: the library is not there, or the processor has no such instruction set.
    """
    try:
        found = instruction_sets()
    except (NativeError, OSError) as error:
        raise InflightError(str(error)) from None
    wanted = wanted or next(iter(found), "avx2")
    if wanted not in found:
        raise InflightError(f"this processor has no {wanted}; it has {', '.join(found) or 'none that is known'}")
    return found[found.index(wanted) :]


def _phases(run: _Run, weights: Number) -> Result:
    from benchmarks.native.phases import Sampling

    return run.phases(weights, Sampling(run.rounds))


def _options(run: _Run) -> Result:
    lead = "What the engine's options bring, each beside the engine whose other options are at their best."
    return run.changes(
        "options", "What each option brings", lead, lambda _: option_changes(run.instruction_sets, run.threads)
    )


def _commits(run: _Run, commits: Sequence[str]) -> Result:
    lead = (
        "What commits brought: each, with all that lies between the two, beside the one in front of it; the first row "
        f"is beside commit {commits[0]}."
    )
    return run.changes(
        "commits", "What each commit brought", lead,
        lambda folder: commit_changes(commits, folder / "commits", run.threads, console.print),
    )  # fmt: skip
