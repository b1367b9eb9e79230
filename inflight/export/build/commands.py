"""``inflight build``: from a Hugging Face checkpoint and a GPU to a deployment."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars

from inflight.export.build.request import CALIBRATION, HELD_OUT, BuildRequest, DataRequest, EngineChoice
from inflight.export.compile.steps import EXAMPLES, Flow
from inflight.export.data import Source
from inflight.export.interpreters import ENVIRONMENT_VARIABLE
from inflight.export.plan.commands import KvCache, Precision
from inflight.export.plan.gpus import CPU, find_gpu, gpu_here
from inflight.export.plan.plan import PlanRequest
from inflight.export.stages import Progress
from inflight.machine import Machine
from inflight.report.failures import one_line_errors
from inflight.report.units import duration
from inflight.settings.deployment import model_name

_console = Console(stderr=True, highlight=False)
_ARTIFACTS = Path("artifacts")
_LOG_INTERVAL_S = 60.0
"""How often a log is told of a phase's progress."""
_AT_ONCE_S = 0.01
"""A step that takes no longer has been taken by an earlier run."""
_load = partial(typer.Option, rich_help_panel="Load to plan for")
_data = partial(typer.Option, rich_help_panel="Calibration and held-out data")
_layers = partial(typer.Option, rich_help_panel="Precision of single layers")

Output = Annotated[
    Path | None, typer.Option(help="Deployment to write; by default artifacts/deployments/MODEL-GPU-PRECISION.")
]
Settings = Annotated[
    Path | None, typer.Option(help="YAML with keys of deployment.yaml: thresholds, batching, speculation, ...")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="With --dry-run: every figure, command and setting, as YAML.")]
LayerCosts = Annotated[
    bool, _layers("--layer-costs", help="Measure what each layer loses; a build that fails does so anyway.")
]
TrtLlmPython = Annotated[
    Path | None,
    typer.Option(
        "--tensorrt-llm-python",
        envvar=ENVIRONMENT_VARIABLE,
        help="The Python that has TensorRT-LLM, which compiles engines; by default it is looked for.",
    ),
]


def build(
    model: Annotated[Path, typer.Option(help="Hugging Face checkpoint directory, not quantized.")],
    gpu: Annotated[str, typer.Option(help="A GPU of build/gpus.toml, cpu, or auto: the GPU of this machine.")] = "auto",
    precision: Precision = "auto",
    kv_cache: KvCache = "auto",
    engine: Annotated[EngineChoice, typer.Option(help="Engine of the deployment.")] = "auto",
    flow: Annotated[Flow | None, typer.Option(help="TensorRT-LLM's flow; by default the precision's first.")] = None,
    output: Output = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    verbose: Verbose = False,
    calibration: Annotated[list[str] | None, _data(help="FILE or FILE:WEIGHT, JSON lines or text; repeat.")] = None,
    calibration_rows: Annotated[int, _data(min=1, help="Rows to calibrate with.")] = DataRequest.calibration_rows,
    held_out: Annotated[list[str] | None, _data(help="FILE or FILE:WEIGHT to measure with; repeat.")] = None,
    held_out_rows: Annotated[int, _data(min=1, help="Rows to measure with.")] = DataRequest.held_out_rows,
    recall_prompts: Annotated[
        int, _data(min=0, help="Long prompts to recall a fact from.")
    ] = DataRequest.recall_prompts,
    max_length: Annotated[int, _data(min=16, help="Tokens of the longest row or prompt.")] = DataRequest.max_length,
    keep: Annotated[list[str] | None, _layers(help="Pattern of linear layers that stay at 16 bits; repeat.")] = None,
    kl_budget: Annotated[
        float | None, _layers(min=0, help="Keep the most sensitive layers at 16 bits; the rest lose this (nats).")
    ] = None,
    layer_costs: LayerCosts = False,
    input_tokens: Annotated[int, _load(min=1, help="Mean length of a prompt.")] = 1024,
    output_tokens: Annotated[int, _load(min=1, help="Mean length of an answer.")] = 256,
    rate: Annotated[float | None, _load(help="Requests per second.")] = None,
    gpus: Annotated[int | None, _load(min=1, help="GPUs at hand.")] = None,
    tensor_parallel: Annotated[int | None, _load(min=1, help="GPUs that share each layer; by default chosen.")] = None,
    examples: Annotated[Path, typer.Option(help="TensorRT-LLM's example scripts, for its TensorRT flow.")] = EXAMPLES,
    tensorrt_llm_python: TrtLlmPython = None,
    device: Annotated[str, typer.Option(help="Where to quantize and measure: auto, cpu or cuda.")] = "auto",
    work: Annotated[Path, typer.Option(help="Where the stages keep their results.")] = _ARTIFACTS / "build",
) -> None:
    """Plan, quantize, compile and verify; write a deployment that `inflight serve` serves."""
    if verbose and not dry_run:
        raise typer.BadParameter("--verbose goes with --dry-run")
    with one_line_errors(_console):
        if gpu == "auto":
            gpu, gpus = gpu_here(), gpus or len(Machine.detect().gpus) or None
        plan = PlanRequest(
            kv_cache=kv_cache, input_tokens=input_tokens, output_tokens=output_tokens, rate=rate, gpus=gpus,
            tensor_parallel_size=tensor_parallel,
        )  # fmt: skip
        data = DataRequest(
            calibration=_sources(calibration, CALIBRATION),
            calibration_rows=calibration_rows,
            held_out=_sources(held_out, HELD_OUT),
            held_out_rows=held_out_rows,
            recall_prompts=recall_prompts,
            max_length=max_length,
        )
        name = f"{model_name(model)}-{gpu}-{precision}"
        output = output or _ARTIFACTS / "deployments" / name
        request = BuildRequest(
            model, gpu, precision, _command(), output, work, engine, flow, plan, data, settings, tuple(keep or ()),
            kl_budget, layer_costs, examples, tensorrt_llm_python, device,
        )  # fmt: skip
        _print_dry_run(request, verbose) if dry_run else _run(request)


def _print_dry_run(request: BuildRequest, verbose: bool) -> None:
    from inflight.export.build.blueprint import make_blueprint  # PyTorch comes with it, which takes seconds
    from inflight.export.build.dry_run import as_summary, as_text
    from inflight.export.build.pipeline import known_cpu, measure_for
    from inflight.export.checkpoint import inspect

    if request.gpu == CPU:
        with _progress() as progress:
            gpu = known_cpu(request) or measure_for(request, progress)
    else:
        gpu = find_gpu(request.gpu)
    blueprint = make_blueprint(request, inspect(request.model), gpu, dry_run=True)
    print(as_text(blueprint) if verbose else as_summary(blueprint), end="")


def _run(request: BuildRequest) -> None:
    with _progress() as progress:
        progress("loading PyTorch", 0, 0)
        from inflight.export.build.pipeline import Build

        ran = Build(request, _show, progress).run()
    if not ran:
        _console.print("nothing to do: every stage was done before", markup=False)


def _show(stage: str, line: str) -> None:
    _console.print(f"{stage:<11} {line}", markup=False, soft_wrap=True)


class ProgressLog:
    """Tells a log how far a phase of a build is: when it begins, and then once a minute, with the time left."""

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say, self._clock = say, clock
        self._phase, self._done, self._said_at = "", 0, 0.0
        self._last, self._is_new = 0.0, False

    def step(self, what: str, done: int, total: int) -> None:
        """Take note that ``done`` of a phase's ``total`` steps are done; a phase without steps is not told.

        The rate is that of the last minute, without the steps of an earlier run, which take no time.
        """
        now = self._clock()
        if what != self._phase and total:
            self._say(f"{what}, {total:,} steps")
            self._phase, self._done, self._said_at, self._is_new = what, done, now, False
        elif what == self._phase:
            self._is_new = self._is_new or now - self._last > _AT_ONCE_S
            if not self._is_new:
                self._done, self._said_at = done, now
            if done < total and now - self._said_at >= _LOG_INTERVAL_S:
                rate = (done - self._done) / (now - self._said_at)
                left = f", {duration((total - done) / rate)} left" if rate else ""
                self._say(f"{what}, {done:,} of {total:,} steps, {60 * rate:.3g} a minute{left}")
                self._done, self._said_at = done, now
        self._last = now


@contextmanager
def _progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Show a bar for what is being done now; where there is no terminal, a line when it begins and one a minute."""
    # A file of its own: `quiet` sends what is written to sys.stderr meanwhile to a log.
    console = Console(file=sys.stderr, highlight=False)
    log = ProgressLog(lambda line: console.print(f"  {line}", markup=False, soft_wrap=True), clock)
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBars(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        task, shown = bars.add_task("", visible=False), ""

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            if not console.is_terminal:
                log.step(what, done, total)
            if what != shown:
                bars.reset(task)
                shown = what
            bars.update(
                task, description=what[-80:], completed=done, total=total or None, visible=done < total or not total
            )

        yield show


def _sources(texts: list[str] | None, default: tuple[Source, ...]) -> tuple[Source, ...]:
    return tuple(Source.parse(text) for text in texts) if texts else default


def _command() -> str:
    """Return the command line, as a shell would take it; what a deployment is rebuilt with."""
    program, *arguments = sys.argv
    name = Path(program).name
    return shlex.join([*(("python", f"build/{name}") if name.endswith(".py") else (name,)), *arguments])
