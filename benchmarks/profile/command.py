"""The command ``profile``: where the time of the portable engine's steps goes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from benchmarks.command import command_line, console
from inflight.errors import DeploymentError
from inflight.report.failures import one_line_errors
from inflight.report.provenance import provenance
from inflight.resources import DEMO, bundled
from inflight.settings.deployment import Deployment, load_deployment

if TYPE_CHECKING:  # PyTorch is loaded by the command that needs it, and not by the others
    from benchmarks.profile.measure import KernelTime, Load, NativePhaseTime, Profile

TRACE, RESULT = "trace.json.gz", "profile.json"


def profile(
    directory: Annotated[Path, typer.Argument(help="Deployment directory; the demo by default.")] = DEMO,
    streams: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    shared_prefix: Annotated[int, typer.Option(min=0, help="First tokens that all prompts share.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 50,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before those.")] = 20,
    output: Annotated[Path, typer.Option(file_okay=False, help=f"Where {TRACE} and {RESULT} go.")] = Path(
        "artifacts/profile"
    ),
) -> None:
    """Profile the portable engine in this process, without Triton, under a load of random prompts."""
    with one_line_errors(console):
        deployment = load_deployment(bundled(directory))
        _check(deployment, prompt_tokens, shared_prefix)
        _make(output)
        result, load = _run(deployment, (streams, prompt_tokens, output_tokens, shared_prefix), warm_up, steps, output)
    record: dict[str, Any] = {"load": asdict(load), "warm_up": warm_up} | asdict(result)
    command = command_line(
        f"profile {directory} --streams {streams} --prompt-tokens {prompt_tokens} --output-tokens {output_tokens}",
        f"--shared-prefix {shared_prefix} --steps {steps} --warm-up {warm_up}",
    )
    (output / RESULT).write_text(json.dumps({"command": command, **provenance(), **record}, indent=1) + "\n")
    show(result, Console(highlight=False))
    console.print(
        f"{output / TRACE} opens in https://ui.perfetto.dev; {output / RESULT} has the figures", soft_wrap=True
    )


def _check(deployment: Deployment, prompt_tokens: int, shared_prefix: int) -> None:
    """
    Raises:
        DeploymentError: naming what cannot be profiled so, and the limit.
    """
    kind = deployment.engine.kind
    if kind != "pytorch":
        raise DeploymentError(f"engine.kind is {kind}; only the portable engine, pytorch, can be profiled")
    if shared_prefix > prompt_tokens:
        raise DeploymentError(f"--shared-prefix is {shared_prefix}, more than --prompt-tokens, {prompt_tokens}")


def _make(output: Path) -> None:
    """Make the folder.

    Raises:
        DeploymentError: it cannot be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeploymentError(f"--output {output}: {error.strerror}") from None


def _run(
    deployment: Deployment, shape: tuple[int, int, int, int], warm_up: int, steps: int, output: Path
) -> tuple[Profile, Load]:
    """Load the engine and take the profile, with a bar for each of its two passes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with console.status("loading the engine"):
        from benchmarks.profile.measure import Load, take_profile
        from inflight.engine.config import EngineConfig
        from inflight.engine.device import resolve_device
        from inflight.engine.engine import Engine
        from inflight.engine.model_runner import ModelRunner

        config = EngineConfig.of(deployment, resolve_device(deployment.engine.device).type == "cuda")
        if shape[0] > config.max_batch_size:
            raise DeploymentError(
                f"--streams is {shape[0]}; batching.max_batch_size is {config.max_batch_size}, the rest would only wait"
            )
        runner = ModelRunner(config)
        engine = Engine(runner, tokenizer=None)
        engine.warm_up()
    load = Load(*shape)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # the profiler's library reports its own starts and stops otherwise
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        return take_profile(engine, runner, load, warm_up, steps, output / TRACE, progress), load


def show(result: Profile, out: Console) -> None:
    on_gpu = result.device != "cpu"
    threads = f"{result.threads} CPU thread{'s' if result.threads > 1 else ''}"
    out.print(
        f"{result.steps} steps on {result.device} with {threads}; on average {result.sequences_per_step:.1f} "
        f"sequences, {result.prefill_tokens_per_step:.1f} tokens prefilled and "
        f"{result.decode_tokens_per_step:.1f} decoded each",
        soft_wrap=True,
    )
    out.print(
        f"{result.plain_ms_per_step:.2f} ms per step, and {result.profiled_ms_per_step:.2f} ms under the profiler, "
        f"which makes a step {result.slowdown:.2f} times as long (median); the tables are of the profiled steps",
        soft_wrap=True,
    )
    if result.slowdown < 1:
        out.print("no profiler makes steps shorter: the machine was busy with something else meanwhile")
    for title, first, rows in (
        ("Phases of a step", ("phase",), [asdict(row) for row in result.phases]),
        ("Operators", ("operator", "phase"), [asdict(row) for row in result.operators]),
    ):
        table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
        for name in first:
            table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=32)
        for name in ("ms/step", "share", *(["GPU ms/step"] if on_gpu else []), "calls/step"):
            table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
        for row in rows:
            device = [f"{row['device_ms_per_step']:.3f}"] if on_gpu else []
            numbers = [f"{row['ms_per_step']:.3f}", f"{row['share']:.1%}", *device, f"{row['calls_per_step']:g}"]
            table.add_row(*(row[name] for name in first), *numbers)
        out.print(table)
    if result.native:
        _show_native(result.native, out)
    if result.kernels:
        _show_kernels(result.kernels, out)


def _show_native(phases: list[NativePhaseTime], out: Console) -> None:
    table = Table(title="Phases of the native step", box=SIMPLE_HEAD, title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name in ("ms/step", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in phases:
        table.add_row(row.phase, f"{row.ms_per_step:.3f}", f"{row.share:.1%}")
    out.print(table)


def _show_kernels(kernels: list[KernelTime], out: Console) -> None:
    table = Table(title="Kernels", box=SIMPLE_HEAD, title_justify="left")
    for name in ("kernel", "phase"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=48)
    for name in ("GPU ms/step", "share", "calls/step"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for row in kernels:
        numbers = f"{row.device_ms_per_step:.3f}", f"{row.share:.1%}", f"{row.calls_per_step:g}"
        table.add_row(Text(row.kernel), row.phase, *numbers)
    out.print(table)
