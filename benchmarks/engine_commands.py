"""The commands that measure the portable engine in this process, without a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from inflight.errors import EngineFailure
from inflight.report.failures import one_line_errors

if TYPE_CHECKING:  # PyTorch is loaded by the command that needs it, and not by the others
    from benchmarks.result import Result
    from benchmarks.setting import Setting

HEADLINE_NAMES = (
    "batching",
    "paging",
    "prefix",
    "chunking",
    "kv-types",
    "weights",
    "speculation",
    "drafters",
    "offload",
    "eviction",
    "priorities",
    "fairness",
)
"""The names of ``headlines.catalogue``, which takes seconds to import; a test holds them equal."""

Checkpoints = Annotated[Path, typer.Option(help="Where the checkpoints are, or are made.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores but one by default.")]
_ENGINE_PAGE = Page(
    "The engine's speed",
    "The portable engine in one process, without a server, on Llama shapes with random weights, which the commands "
    "make themselves; the scheduler's cost is measured without a model. Written by `make bench` with the commands "
    "`engine`, `scheduler` and `soak`, each with `--output docs/results/engine`.",
    ("speed", "phases", "step", "start", "scheduler", "soak"),
)
_HEADLINES_PAGE = Page(
    "What in-flight batching is known for",
    "Each result of the literature, reproduced on the portable engine and on this machine: what it brings, and "
    'where it stops paying. Written by `make bench ARGS="headlines --output docs/results/headlines"`; each section '
    "names the command that makes it alone.",
    HEADLINE_NAMES,
)


_HYBRID_PAGE = Page(
    "Prefix reuse of hybrids",
    "The portable engine in one process, without a server, on a Qwen3.5 of 0.15 billion random parameters. "
    'Written by `make bench ARGS="hybrid --output docs/results/hybrid"`.',
    ("hybrid-reuse",),
)
_ADAPTER_PAGE = Page(
    "The adapter's speed",
    "What an architecture costs that transformers' code computes, in place of Inflight's own: the same Llama "
    'checkpoint with each. Written by `make bench ARGS="adapter --output docs/results/adapter"`; '
    "[the adapter](../../adapter.md) says what it is.",
    ("adapter",),
)


@dataclass(frozen=True)
class _Place:
    """What commands run on, as it is given."""

    checkpoints: Path
    device: str
    threads: int | None

    def setting(self, quick: bool = False) -> Setting:
        """Return what measurements are told."""
        with one_line_errors(console):
            from benchmarks.setting import Setting

        return Setting(self.checkpoints, console.print, quick, self.device, self.threads)

    def command(self, *words: str) -> str:
        """Return a command line; of the place, what is not the default and changes figures."""
        device = [] if self.device == "cpu" else [f"--device {self.device}"]
        threads = [] if self.threads is None else [f"--threads {self.threads}"]
        return command_line(*words, *device, *threads)


def engine(
    model: Annotated[list[str] | None, typer.Option(help="6.8M or 125M; repeat for both.")] = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once; repeat for several.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=2048, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, max=2048, help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each of the six is measured.")] = 6,
    checkpoints: Checkpoints = FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure decode and prefill beside transformers' generate and continuous batching, and profile the steps."""
    with one_line_errors(console):
        from benchmarks.checkpoints import SHAPES
        from benchmarks.speed import Lengths, measure_speed

    names, counts = model or list(SHAPES), streams or [1, 8, 32]
    for name in names:
        if name not in SHAPES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(SHAPES)}", param_hint="--model")
    options = [*(f"--model {name}" for name in names), *(f"--streams {count}" for count in counts)]
    options += [f"--prompt-tokens {prompt_tokens} --output-tokens {output_tokens} --rounds {rounds}"]
    shapes, lengths = [SHAPES[name] for name in names], Lengths(prompt_tokens, output_tokens)
    place = _Place(checkpoints, device, threads)
    setting, command = place.setting(), place.command("engine", *options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library reports its own starts and stops otherwise
    report_results(lambda: measure_speed(setting, shapes, counts, lengths, rounds), command, output, _ENGINE_PAGE)


def headlines(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Any of {', '.join(HEADLINE_NAMES)}; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A short run of each, to check that it works.")] = False,
    checkpoints: Checkpoints = FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Reproduce what in-flight batching is known for: a table, a picture and a sentence each."""
    for name in names or ():
        if name not in HEADLINE_NAMES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(HEADLINE_NAMES)}", param_hint="NAMES")
    with one_line_errors(console):
        from benchmarks.headlines.catalogue import HEADLINES

    place = _Place(checkpoints, device, threads)
    setting, options = place.setting(quick), ["--quick"] if quick else []

    def results(name: str) -> list[Result]:
        return [HEADLINES[name](setting)]

    for name in names or HEADLINE_NAMES:
        command = place.command("headlines", name, *options)
        report_results(partial(results, name), command, output, _HEADLINES_PAGE)


def hybrid(
    quick: Annotated[bool, typer.Option(help="A short run on a tiny model, to check that it works.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure what prefix reuse saves of a model with recurrent layers, which reuse needs snapshots of states for."""
    with one_line_errors(console):
        from benchmarks.hybrid import hybrid_reuse

    place = _Place(FOLDER, device, threads)
    setting, command = place.setting(quick), place.command("hybrid", *(["--quick"] if quick else []))
    report_results(lambda: [hybrid_reuse(setting)], command, output, _HYBRID_PAGE)


def adapter(
    rounds: Annotated[int, typer.Option(min=1, help="How often each step is measured.")] = 5,
    quick: Annotated[bool, typer.Option(help="A short run on a tiny model, to check that it works.")] = False,
    checkpoints: Checkpoints = FOLDER,
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure decode and prefill of a Llama by the native step, by Inflight's PyTorch and by transformers' code."""
    with one_line_errors(console):
        from benchmarks.adapter import adapter_speed

    place = _Place(checkpoints, "cpu", threads)
    setting, options = place.setting(quick), [f"--rounds {rounds}", *(["--quick"] if quick else [])]
    report_results(lambda: [adapter_speed(setting, rounds)], place.command("adapter", *options), output, _ADAPTER_PAGE)


def scheduler(
    steps: Annotated[int, typer.Option(min=10, help="How many steps of each case.")] = 1000,
    output: Output = None,
) -> None:
    """Measure what the scheduler itself takes of a step, with up to 512 sequences running and 2,000 waiting."""
    with one_line_errors(console):
        from benchmarks.scheduler import measure_scheduler

    command = command_line("scheduler", f"--steps {steps}")
    report_results(lambda: [measure_scheduler(steps)], command, output, _ENGINE_PAGE)


def soak(
    requests: Annotated[int, typer.Option(min=100, help="How many short requests.")] = 100_000,
    checkpoints: Checkpoints = FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Send very many short requests; fail if memory grows, or if a block is missing at an idle moment."""
    with one_line_errors(console):
        from benchmarks.soak import soak as run
        from benchmarks.soak import soak_result

    place = _Place(checkpoints, device, threads)
    setting, flat = place.setting(), [False]

    def results() -> list[Result]:
        result, flat[0] = soak_result(run(setting, requests))
        return [result]

    report_results(results, place.command("soak", f"--requests {requests}"), output, _ENGINE_PAGE)
    with one_line_errors(console):
        if not flat[0]:
            raise EngineFailure("memory grows, or too few requests were sent to tell that it does not")
