"""``inflight bench engine``, ``headlines``, ``scheduler``, ``soak``: the portable engine in this process, no server.

``inflight bench recovery``, ``soak-server``: a whole server, from outside.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from inflight.errors import EngineFailure
from inflight.report.failures import one_line_errors
from inflight.report.results import print_table
from inflight.resources import DEMO, bundled

if TYPE_CHECKING:  # PyTorch is loaded by the command that needs it, and not by the others
    from inflight.bench.result import Result
    from inflight.bench.setting import Setting

_console = Console(stderr=True, highlight=False)
_HEADLINES = (
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
"""Names of ``headlines.catalogue``, which is not imported to complete a command line; a test holds them equal."""

Checkpoints = Annotated[Path, typer.Option(help="Where the checkpoints are, or are made.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores but one by default.")]
Output = Annotated[Path | None, typer.Option(help="Write JSON, pictures and a page to this folder too.")]
_FOLDER = Path("artifacts/bench")
_ENGINE_PAGE = (
    "The engine's speed",
    "The portable engine in one process, without a server, on Llama shapes with random weights, which the commands "
    "make themselves; the scheduler's cost is measured without a model. Written by `inflight bench engine`, `inflight "
    "bench scheduler` and `inflight bench soak`, each with `--output docs/results/engine`.",
    ("speed", "phases", "step", "start", "scheduler", "soak"),
)
_SOAK_PAGE = (
    "The soak of a server",
    "A real server on this machine, asked by all its features at random for minutes, and then stopped. Written by "
    "`inflight bench soak-server --output docs/results/soak`; [the documentation](../../benchmarks.md) says what is "
    "asked, and what counts as a fault.",
    ("memory", "ends"),
)
_HEADLINES_PAGE = (
    "What in-flight batching is known for",
    "Each result of the literature, reproduced on the portable engine and on this machine: what it brings, and "
    "where it stops paying. Written by `inflight bench headlines --output docs/results/headlines`; each section "
    "names the command that makes it alone.",
    _HEADLINES,
)

_SERVING_PAGE = (
    "The server as a whole",
    "`inflight serve` from outside, with the demo. Written by `inflight bench recovery --output docs/results/serving`.",
    ("recovery",),
)


@dataclass(frozen=True)
class _Place:
    """What commands run on, as it is given."""

    checkpoints: Path
    device: str
    threads: int | None

    def setting(self, quick: bool = False) -> Setting:
        """Return what measurements are told."""
        with one_line_errors(_console):
            from inflight.bench.setting import Setting

        return Setting(self.checkpoints, _console.print, quick, self.device, self.threads)

    def command(self, *words: str) -> str:
        """Return a command line; of the place, what is not the default and changes figures."""
        device = [] if self.device == "cpu" else [f"--device {self.device}"]
        threads = [] if self.threads is None else [f"--threads {self.threads}"]
        return " ".join(["inflight bench", *words, *device, *threads])


def engine(
    model: Annotated[list[str] | None, typer.Option(help="6.8M or 125M; repeat for both.")] = None,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at once; repeat for several.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=2048, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, max=2048, help="Tokens of each answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each of the six is measured.")] = 6,
    checkpoints: Checkpoints = _FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Measure decode and prefill beside transformers' generate and continuous batching, and profile the steps."""
    with one_line_errors(_console):
        from inflight.bench.checkpoints import SHAPES
        from inflight.bench.speed import Lengths, measure_speed

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
    _run(lambda: measure_speed(setting, shapes, counts, lengths, rounds), command, output, _ENGINE_PAGE)


def headlines(
    names: Annotated[list[str] | None, typer.Argument(help=f"Any of {', '.join(_HEADLINES)}; all by default.")] = None,
    quick: Annotated[bool, typer.Option(help="A short run of each, to check that it works.")] = False,
    checkpoints: Checkpoints = _FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Reproduce what in-flight batching is known for: a table, a picture and a sentence each."""
    for name in names or ():
        if name not in _HEADLINES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(_HEADLINES)}", param_hint="NAMES")
    with one_line_errors(_console):
        from inflight.bench.headlines.catalogue import HEADLINES

    place = _Place(checkpoints, device, threads)
    setting, options = place.setting(quick), ["--quick"] if quick else []
    for name in names or _HEADLINES:
        command = place.command("headlines", name, *options)
        _run(partial(_one, HEADLINES[name], setting), command, output, _HEADLINES_PAGE)


def scheduler(
    steps: Annotated[int, typer.Option(min=10, help="How many steps of each case.")] = 1000,
    output: Output = None,
) -> None:
    """Measure what the scheduler itself takes of a step, with up to 512 sequences running and 2,000 waiting."""
    with one_line_errors(_console):
        from inflight.bench.scheduler import measure_scheduler

    command = f"inflight bench scheduler --steps {steps}"
    _run(lambda: [measure_scheduler(steps)], command, output, _ENGINE_PAGE)


def soak(
    requests: Annotated[int, typer.Option(min=100, help="How many short requests.")] = 100_000,
    checkpoints: Checkpoints = _FOLDER,
    device: Device = "cpu",
    threads: Threads = None,
    output: Output = None,
) -> None:
    """Send very many short requests; fail if memory grows, or if a block is missing at an idle moment."""
    with one_line_errors(_console):
        from inflight.bench.soak import soak as run
        from inflight.bench.soak import soak_result

    place = _Place(checkpoints, device, threads)
    setting, flat = place.setting(), [False]

    def results() -> list[Result]:
        result, flat[0] = soak_result(run(setting, requests))
        return [result]

    _run(results, place.command("soak", f"--requests {requests}"), output, _ENGINE_PAGE)
    with one_line_errors(_console):
        if not flat[0]:
            raise EngineFailure("memory grows, or too few requests were sent to tell that it does not")


def recovery(
    streams: Annotated[int, typer.Option(min=2, max=64, help="Streams that run when a process is hurt.")] = 32,
    output: Output = None,
) -> None:
    """Kill and stop each process of a server under streams; measure until these end, and until it answers again."""
    with one_line_errors(_console):
        from inflight.bench.recovery import measure_recovery

    command = f"inflight bench recovery --streams {streams}"
    _run(lambda: [measure_recovery(streams, _console.print)], command, output, _SERVING_PAGE)


def soak_server(
    directory: Annotated[Path, typer.Argument(help="Deployment directory.")] = DEMO,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of load.")] = 20,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Requests at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    raw: Annotated[Path, typer.Option(help="Where every sample and every wrong end is written.")] = _FOLDER
    / "soak-server.json",
    output: Output = None,
) -> None:
    """Serve a deployment under random load for some minutes and stop it; fail if it grows, loses a stream or hangs."""
    with one_line_errors(_console):
        from inflight.bench.server_soak.report import faults, results
        from inflight.bench.server_soak.run import serve_and_soak, write_raw

        soaked = serve_and_soak(bundled(directory), minutes, clients, seed, _console.print)
        write_raw(soaked, raw)
    command = f"inflight bench soak-server --minutes {minutes:g} --clients {clients} --seed {seed}"
    _run(lambda: results(soaked), command, output, _SOAK_PAGE)
    with one_line_errors(_console):
        if found := faults(soaked):
            raise EngineFailure(f"{'; '.join(found)}; {raw} has the whole of it")


def _one(measure: Callable[[Setting], Result], setting: Setting) -> list[Result]:
    return [measure(setting)]


def _run(
    measure: Callable[[], Sequence[Result]], command: str, output: Path | None, page: tuple[str, str, Sequence[str]]
) -> None:
    """Measure, show, and write to ``output``; a failure is one line."""
    with one_line_errors(_console):
        for result in measure():
            print_table(result.title, result.rows)
            _console.print(result.finding, result.caveat, "", sep="\n", markup=False, soft_wrap=True)
            if output is not None:
                _write(result, command, output, page)


def _write(result: Result, command: str, output: Path, page: tuple[str, str, Sequence[str]]) -> None:
    from inflight.bench.result import write_page, write_result

    write_result(result, output, command)
    write_page(output, *page)
