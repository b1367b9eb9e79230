"""``make bench ARGS=faults``: everything that can break under a server is broken, and what clients see is counted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Annotated

import typer

from benchmarks.command import Output, Page, command_line, console, report_results
from benchmarks.result import Result, Row
from inflight.errors import EngineFailure, InvalidRequest
from inflight.report.failures import one_line_errors

_PAGE = Page(
    "Faults under load",
    "`inflight serve` with the demo, from outside, while something breaks. Written by "
    '`make bench ARGS="faults --output docs/results/faults"`, and with `rolling` in place of `faults`.',
    ("faults", "rolling"),
)


def faults(
    streams: Annotated[int, typer.Option(min=2, max=64, help="Streams that run when something breaks.")] = 32,
    only: Annotated[list[str] | None, typer.Option(help="A word of the faults to try; repeat for several.")] = None,
    output: Output = None,
) -> None:
    """Kill, freeze, fill up and take away what a server stands on, under streams; needs root."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then too
    broken: list[str] = []

    def results() -> Iterator[Result]:
        from benchmarks.faults.kinds import all_faults
        from benchmarks.faults.place import make_place
        from benchmarks.faults.report import broken_promises, faults_result
        from benchmarks.faults.run import try_fault, unbroken_texts

        with make_place() as place:
            chosen = [one for one in all_faults(place) if not only or any(word in one.title for word in only)]
        if not chosen:
            raise InvalidRequest(f"--only is {', '.join(only or ())}: no fault has this in its title")
        texts, outcomes = unbroken_texts(streams), []
        for fault in chosen:
            outcomes.append(try_fault(fault, texts))
            found = broken_promises(outcomes[-1], streams)
            broken.extend(f"{fault.title}: {one}" for one in found)
            console.print(f"{fault.title}: {'; '.join(found) or 'as promised'}", markup=False, soft_wrap=True)
            for message, count in outcomes[-1].messages.items():
                console.print(f"  {count} times: {message}", markup=False, soft_wrap=True)
        yield faults_result(outcomes, streams)

    chosen = "".join(f" --only '{word}'" for word in only or ())
    report_results(results, command_line("faults", f"--streams {streams}{chosen}"), output, _PAGE)
    with one_line_errors(console):
        if broken:
            raise EngineFailure(f"{len(broken)} things were not as promised")


def rolling(
    clients: Annotated[int, typer.Option(min=1, max=16, help="Clients of each kind of request.")] = 3,
    output: Output = None,
) -> None:
    """Stop, and then kill, one of two replicas after the other under load; fail if a request does; needs root."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: list[Row] = []

    def results() -> Iterator[Result]:
        from benchmarks.faults.rolling import measure_rolling, rolling_result

        rows.extend(measure_rolling(clients, lambda line: console.print(line, markup=False, soft_wrap=True)))
        yield rolling_result(rows)

    report_results(results, command_line("rolling", f"--clients {clients}"), output, _PAGE)
    with one_line_errors(console):
        if failed := sum(int(row["not as promised"]) for row in rows):
            raise EngineFailure(f"{failed} requests failed that must not")
