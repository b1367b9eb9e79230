"""``inflight bench``: measurements that anyone can repeat, each with a committed result file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from inflight.load import pipeline as measured
from inflight.load.observability import EngineLoad, measure_observability
from inflight.report.failures import one_line_errors
from inflight.report.results import print_table, write_results
from inflight.resources import DEMO

bench = typer.Typer(help="Measure Inflight.", no_args_is_help=True)
_console = Console(stderr=True, highlight=False)


@bench.callback()
def _group() -> None:
    """Measure Inflight."""


@bench.command()
def pipeline(
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeat for several.")] = None,
    step_ms: Annotated[list[float] | None, typer.Option(help="Time of an engine step; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5,
    model: Annotated[Path, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO / "model",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file too.")] = None,
) -> None:
    """Stream through the real ensemble with an engine that costs nothing: what the stages can do."""

    def results() -> Iterator[measured.PipelineResult]:
        for step in step_ms or [0.0, 2.0]:
            with measured.replay_server(model, step) as server:
                for count in streams or [1, 8, 32, 128]:
                    _console.print(f"{count} streams, {step:g} ms per step")
                    yield measured.measure(server, count, step, seconds)

    title = "The pipeline, with an engine that costs nothing"
    _report(results, title, f"inflight bench pipeline --seconds {seconds:g}", output)


@bench.command()
def tokenizer(
    words: Annotated[list[int] | None, typer.Option(help="Words per prompt; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement; there are ten per row.")] = 2,
    model: Annotated[Path, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO / "model",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file too.")] = None,
) -> None:
    """Compare the tokenizer stage with the upstream ensemble's, rebuilt (it needs transformers)."""
    from inflight.load.tokenizer import measure_tokenizers  # with gRPC, which no other command needs to start

    title = "The tokenizer stage and upstream's preprocessing, requests per second"
    _report(
        lambda: measure_tokenizers(model, words or [10, 100, 500], seconds),
        title,
        f"inflight bench tokenizer --seconds {seconds:g}",
        output,
    )


@bench.command()
def observability(
    engine: Annotated[list[str] | None, typer.Option(help="engine.kind; repeat for several.")] = None,
    step_ms: Annotated[
        list[float] | None, typer.Option(min=0, help="Time of a step of the replay engine; repeat for several.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured.")] = 7,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Length of each measurement; there are three per round.")
    ] = 1.5,
    model: Annotated[Path, typer.Option(help="Checkpoint to serve.")] = DEMO / "model",
    output: Annotated[Path | None, typer.Option(help="Write the results to this JSON file too.")] = None,
) -> None:
    """Compare a server that shows nothing with one that has metrics, and one that has metrics and traces."""
    if step_ms and engine and "replay" not in engine:
        raise typer.BadParameter("only the replay engine's steps can be set", param_hint="--step-ms")
    chosen = [*(f"--engine {one} " for one in engine or ()), *(f"--step-ms {one:g} " for one in step_ms or ())]
    loads = [
        EngineLoad(kind, step)
        for kind in engine or ["replay", "pytorch"]
        for step in (step_ms or [0.0, 10.0] if kind == "replay" else [None])
    ]
    _report(
        lambda: measure_observability(model, loads, streams, rounds, seconds, _console.print),
        "What metrics and traces cost",
        f"inflight bench observability {''.join(chosen)}--streams {streams} --rounds {rounds} --seconds {seconds:g}",
        output,
    )


def _report(measure: Callable[[], Iterable[Any]], title: str, command: str, output: Path | None) -> None:
    """Measure, show a row for each result (a dataclass), and write them to ``output``; a failure is one line."""
    with one_line_errors(_console):
        rows = [asdict(result) for result in measure()]
    print_table(title, rows)
    if output is not None:
        write_results(output, command, rows)
