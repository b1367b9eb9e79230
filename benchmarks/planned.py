"""``make bench ARGS="planned DEPLOYMENT ..."``: serves deployments of `inflight build`, and compares their speed with
what their plans say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import Output, Page, command_line, report_results
from benchmarks.result import Result, Row
from inflight.errors import InflightError
from inflight.export.plan.full_batch import SPREAD
from inflight.load.measurements import Figures
from inflight.load.run_command import run_scenario, target_at
from inflight.load.scenario import validate_scenario
from inflight.manifest import read_manifest
from inflight.settings.deployment import load_deployment

_PAGE = Page(
    "Plans for a CPU",
    "Deployments that `inflight build --gpu cpu` has written, served to one stream and to as many as their plans run "
    "at once, beside what the plans say. `published --builds` does that for SmolLM2 in each precision.",
    ("served",),
)
_LEAST_S = 10.0
"""Seconds that are measured, at least."""
_PLANNED_WITHIN = 1.5
"""How many times as long, or as short, a time may be as it was planned."""


def planned(
    deployments: Annotated[list[Path], typer.Argument(help="Deployments that `inflight build --gpu cpu` has written.")],
    output: Output = None,
) -> None:
    """Serve deployments that were built for this CPU, and compare their speed with what their plans say."""
    command = command_line("planned", *map(str, deployments))
    report_results(lambda: measure(deployments), command, output, _PAGE)


def measure(deployments: Sequence[Path]) -> Iterator[Result]:
    """Serve each deployment to one stream and to as many as its plan has, and yield all rows at the end.

    Raises:
        InflightError: no build has written a deployment, or its plan does not predict its speed.
    """
    yield compared([row for directory in deployments for row in compare(directory)])


def compared(rows: Sequence[Row]) -> Result:
    """Return plans beside what was served, as a result."""
    ratios = [float(row[f"{name} ratio"]) for row in rows for name in ("TTFT", "ITL")]
    return Result(
        "served",
        "Planned and served",
        f"Of {len(ratios)} times, {sum(1 / _PLANNED_WITHIN <= one <= _PLANNED_WITHIN for one in ratios)} are planned "
        f"within {_PLANNED_WITHIN:g} times of what was served: TTFT is the mean time to the first token over HTTP, "
        "ITL the mean of the times between tokens of a stream. The ratio is what was planned, divided by what was "
        "served.",
        rows,
        caveat="Clients and server share the cores. Streams are a closed loop, each asks again at once: of several the "
        "plan is what its simulation of the scheduler says of this very loop.",
    )


def compare(directory: Path) -> Iterator[Row]:
    """Yield the row of a deployment for one stream, and the row for as many as it runs at once."""
    plan = read_manifest(directory).plan
    if plan.get("full") is None:
        raise InflightError(f"{directory}: its plan does not predict what a full batch meets; build it again for a CPU")
    engine = load_deployment(directory).engine
    most = plan["max_batch_size"]
    for streams, planned in ((1, plan["unloaded"]), (most, plan["full"])):
        served = _serve(directory, plan["request"], streams, planned)
        row: dict[str, float | str] = {
            "deployment": directory.name,
            "kernels": engine.cpu_step,
            "streams": streams,
            "prompt": plan["request"]["input_tokens"],
            "answer": plan["request"]["output_tokens"],
        }
        assert served.ttft_ms is not None, "the window has requests"
        assert served.mean_itl_ms is not None, "and answers of several tokens"
        times = {"TTFT": (planned["ttft_ms"], served.ttft_ms.mean), "ITL": (planned["itl_ms"], served.mean_itl_ms.mean)}
        for name, (expected, seen) in times.items():
            row[f"{name} planned, ms"] = round(expected, 1)
            row[f"{name} served, ms"] = round(seen, 1)
            row[f"{name} ratio"] = round(expected / seen, 2)
        row["tokens/s planned"] = round(planned["tokens_per_second"], 1)
        row["tokens/s served"] = round(served.output_tokens_per_second, 1)
        yield row


def _serve(directory: Path, request: dict[str, Any], streams: int, planned: dict[str, Any]) -> Figures:
    """Return the figures of a deployment with so many streams of the plan's prompts and answers."""
    seconds = (planned["ttft_ms"] + planned["itl_ms"] * request["output_tokens"]) / 1000
    lengths = {
        name: {
            "distribution": "uniform",
            **{
                bound: round(request[f"{kind}_tokens"] * share)
                for bound, share in zip(("min", "max"), SPREAD, strict=True)
            },
        }
        for name, kind in (("prompt_tokens", "input"), ("output_tokens", "output"))
    }
    phases = [
        {"duration_s": seconds, "concurrency": 0, "to_concurrency": streams, "steady": False},
        {"duration_s": max(seconds, _LEAST_S), "concurrency": streams},
        {"duration_s": seconds, "concurrency": streams, "steady": False},  # who began before this ends beside others
    ]
    data = {"phases": phases, "classes": [{"name": "planned", **lengths}], "drain_s": 10 * seconds}
    scenario = validate_scenario(data, directory, "the plan's load")
    with target_at(None, directory, None, http=True) as target:
        return run_scenario(scenario, target, 0, "").figures
