"""``make bench ARGS=gateway``: what the gateway costs beside the KServe path, and what programs of others say of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.command import FOLDER, Output, Page, command_line, console, report_results
from benchmarks.gateway.lm_eval import differences, on_both
from benchmarks.gateway.paths import ENGINE, ENSEMBLE, GATEWAY, Measured, measure, ratios
from benchmarks.gateway.served import serve
from benchmarks.gateway.tools import run_tools
from benchmarks.result import Result
from inflight.resources import DEMO

Part = Literal["all", "paths", "lm-eval", "tools"]
_PAGE = Page(
    "The gateway, beside the KServe path and under programs of others",
    "OpenAI's API through the gateway, measured on the machine that serves, with the clients beside it. Written by "
    '`make bench ARGS="gateway --output docs/results/gateway"`.',
    ("paths-replay", "paths-demo", "lm-eval", "tools"),
)
ENGINES: dict[str, dict[str, Any]] = {
    "replay": {"kind": "replay", "replay_step_ms": 2},
    "demo": {"dtype": "float32"},
}
"""The engine of each measurement: one that computes nothing, with steps of 2 ms, and the demo's."""


def gateway(
    part: Annotated[Part, typer.Option(help="What to measure.")] = "all",
    streams: Annotated[int, typer.Option(min=1, max=256, help="Streams at once.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each of all paths in turn.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of each measurement.")] = 5,
    documents: Annotated[int, typer.Option(min=1, max=300, help="Documents of each of lm-eval's tasks.")] = 24,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load tool.")] = 256,
    output: Output = None,
) -> None:
    """Measure the gateway beside the KServe path, and run lm-eval and load tools on it."""

    def results() -> Iterator[Result]:
        if part in ("all", "paths"):
            yield from (_paths(name, streams, rounds, seconds) for name in ENGINES)
        if part in ("all", "lm-eval"):
            yield _lm_eval(documents)
        if part in ("all", "tools"):
            yield _tools(streams, requests)

    words = f"--part {part} --streams {streams} --rounds {rounds} --seconds {seconds:g} --documents {documents}"
    report_results(results, command_line("gateway", words, f"--requests {requests}"), output, _PAGE)


def _settings(engine: str, streams: int = 32) -> dict[str, Any]:
    return {
        "model": str((DEMO / "model").resolve()),
        "engine": ENGINES[engine],
        "batching": {"max_batch_size": streams},
    }


def _paths(engine: str, streams: int, rounds: int, seconds: float) -> Result:
    rows: list[Measured] = []
    with serve(_settings(engine, streams)) as served:
        for row in measure(served, streams, rounds, seconds):
            console.print(f"{row.path}, round {row.round}: {row.tokens_per_second:,} tokens/s")
            rows.append(row)
    told = [_compared(rows, path) for path in (GATEWAY, ENGINE)]
    finding = f"{streams} streams, {rounds} rounds with the paths in turn. {' '.join(told)}"
    title = f"Tokens per second by three paths: {engine}"
    return Result(f"paths-{engine}", title, finding, [asdict(row) for row in rows])


def _compared(rows: Sequence[Measured], path: str) -> str:
    found = ratios(rows, path, ENSEMBLE)
    return (
        f"By the {path}: {statistics.median(found):.2f} of the ensemble's tokens per second "
        f"({min(found):.2f} to {max(found):.2f})."
    )


def _lm_eval(documents: int) -> Result:
    with serve(_settings("demo"), keys=True) as served:
        theirs, ours = on_both(served, DEMO / "model", FOLDER / "lm-eval", documents)
    rows = list(differences(theirs, ours))
    equal = sum(row["transformers"] == row["gateway"] for row in rows)
    finding = (
        f"lm-eval's scores of {documents} documents of each task, on transformers and through the gateway, on the "
        f"same checkpoint in float32: {equal} of {len(rows)} are equal to the last digit. The largest difference is "
        "that of a log-likelihood, relative to it; of generated texts it is the number of those that differ."
    )
    return Result("lm-eval", "lm-eval on the gateway and on transformers", finding, rows)


def _tools(streams: int, requests: int) -> Result:
    with serve(_settings("replay", streams), keys=True) as served:
        folder = Path(FOLDER / "gateway-tools").resolve()
        rows: list[Any] = list(run_tools(served, (DEMO / "model").resolve(), folder, streams, requests))
    finding = (
        f"{requests} chats of 100 tokens in and 64 out, {streams} at once, on the engine that computes nothing, with "
        "steps of 2 ms. The tools run unmodified, and share the cores with the server: their figures say what they "
        "cost as much as what it does."
    )
    return Result("tools", "Load tools against the gateway", finding, rows)
