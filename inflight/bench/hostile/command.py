"""``inflight bench hostile``: the siege of a server on this machine, and what came of it as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from inflight.errors import EngineFailure
from inflight.report.failures import one_line_errors
from inflight.report.results import print_table

if TYPE_CHECKING:  # imported by the command that needs it, and not by the others
    from inflight.bench.hostile.siege import Siege
    from inflight.bench.result import Result

_console = Console(stderr=True, highlight=False)
_PAGE = (
    "Hostile requests",
    "Random requests of every bad kind that we know, over HTTP and gRPC, from a seed, to a server on the same machine, "
    "beside neighbours whose answers have to stay right. Written by `inflight bench hostile --output "
    "docs/results/hostile`. What no server of this kind survives is in SECURITY.md, and is not sent.",
    ("hostile",),
)


def hostile(
    http: Annotated[str, typer.Option(help="HTTP address of a server on this machine.")] = "127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="Its gRPC address.")] = "127.0.0.1:8001",
    metrics: Annotated[str, typer.Option(help="The address of its metrics.")] = "127.0.0.1:8002",
    requests: Annotated[int, typer.Option(min=20, help="How many requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first request, to repeat a part of a run.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write JSON and a page to this folder too.")] = None,
) -> None:
    """Send hostile requests to a server on this machine; fail if it ends, leaks or answers its neighbours wrongly."""
    with one_line_errors(_console):
        from inflight.bench.hostile.siege import besiege
        from inflight.bench.hostile.target import Places, own_address
        from inflight.bench.result import write_page, write_result

        places = Places(
            own_address(http, "--http", "http"),
            own_address(grpc, "--grpc", "grpc"),
            own_address(metrics, "--metrics", "http"),
        )
        siege = besiege(places, requests, seed, first, _console.print)
        result = siege_result(siege)
        print_table(result.title, result.rows)
        _console.print(result.finding, markup=False, soft_wrap=True)
        flaws = siege.flaws()
        for flaw in flaws:
            _console.print(flaw, style="red", markup=False, soft_wrap=True)
        if output is not None:
            write_result(result, output, f"inflight bench hostile --requests {requests} --seed {seed}")
            write_page(output, *_PAGE)
        if flaws:
            raise EngineFailure(f"{len(flaws)} things are not as they should be")


def siege_result(siege: Siege) -> Result:
    """Return what came of each kind of request."""
    from inflight.bench.hostile import siege as terms
    from inflight.bench.result import Result

    kinds = (terms.ANSWERED, terms.REFUSED, terms.FAILED, terms.CLOSED, terms.SILENT)
    rows: list[dict[str, float | str]] = []
    for kind, counts in sorted(siege.outcomes.items()):
        rows.append({"kind": kind, "requests": counts.total(), **{name: counts[name] for name in kinds}})
    memory = [f"{size / 2**20:,.0f}" for size in siege.memory]
    finding = (
        f"{siege.requests:,} requests, half over HTTP and half over gRPC: the same processes serve to the end, and "
        f"{siege.right:,} answers of neighbours meanwhile are right, {len(siege.wrong)} wrong. "
        f"{siege.left:.0f} requests are in flight afterwards. The server and its stages have {memory[0]} MiB of memory "
        f"after a twentieth, {memory[len(memory) // 2]} after half, {memory[-1]} at the end. Failed: Triton answers "
        "500 or INTERNAL to what it cannot parse; closed: a connection whose bytes are no HTTP request."
    )
    return Result("hostile", "Hostile requests", finding, rows)
